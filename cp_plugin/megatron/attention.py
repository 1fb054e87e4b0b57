"""The core attention module that Megatron's layers build in the place of their own: see ``spec``.

``CoreAttention`` has no parameters and no extra state, so checkpoints are those of stock Megatron.

Shapes: q ``[s/cp, b, h, d]``, k and v ``[s/cp, b, g, d]`` (h and g after tensor parallelism), out ``[s/cp, b, h * d]``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from cp_plugin.attention import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.protocol import Kind

_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class AnyCoreAttention(MegatronModule):
    """What the core attentions of all kinds have in common: Megatron's interface, and what it may ask of them."""

    kind: Kind

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """
        Args: those of Megatron's core attention classes. ``cp_comm_type`` chooses among Transformer Engine's methods
            and has no meaning here; ``num_splits`` belongs to inference.
            softmax_scale: factor on the scores; None is ``d ** -0.5``. ``apply_query_key_layer_scaling`` changes
                nothing: it divides the scores by the layer number in half precision and multiplies them again in
                float32, and here the scores are float32 from the start.

        Raises:
            ValueError: for a layer that the plugin does not support.
        """
        super().__init__(config=config)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check_layer(config, attention_type, dropout, k_channels != v_channels)
        self._cp_group = None
        if config.context_parallel_size > 1:
            self._cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
            if self._cp_group is None:
                raise ValueError(f"layer {layer_number} of a context-parallel model: its pg_collection has no cp group")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The context-parallel group of this layer; None: its tokens are not divided."""
        return self._cp_group

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Use another context-parallel group from now on, None for no context parallelism, as in Transformer Engine."""
        self._cp_group = cp_group

    @property
    def context_parallel(self) -> ContextParallel:
        """What this layer attends with."""
        if self._cp_group is None:
            return runtime.alone(self.kind)
        return runtime.context_parallel(self._cp_group, self.kind)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attend. The mask is given by ``attn_mask_type`` alone: causal or none.

        Raises:
            ValueError: for packed sequences, an attention bias, a mask tensor (even a causal one: it would be taken on
                trust), a key/value cache, shapes the layout cannot divide, or a batch that was not sliced in it.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        reason = _unsupported_call(query, key, attention_mask, mask_type, attention_bias, packed_seq_params)
        if reason is not None:
            raise ValueError(f"layer {self.layer_number}: {runtime.settings().asked} does not support {reason}")
        if self.context_parallel.size > 1:
            runtime.require_sliced_batch()
        return self.attend(query, key, value, causal=_CAUSAL[mask_type]).flatten(2)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Attention of this rank's tokens to all: ``[s/cp, b, h, d]``."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Transformer Engine's attention leaves an (empty) extra state in plain checkpoints: nothing to restore.
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class CoreAttention(AnyCoreAttention):
    """Softmax attention over the whole sequence by the chosen provider."""

    kind = "softmax"

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        return self.context_parallel.attention(query, key, value, causal=causal, scale=self.softmax_scale)


def _check_layer(config: TransformerConfig, attention_type: str, dropout: float, own_value_size: bool) -> None:
    problems = {
        f"{attention_type} attention: only self-attention is": attention_type != "self",
        "multi-latent attention (--multi-latent-attention)": config.multi_latent_attention or own_value_size,
        f"--attention-dropout {dropout}: set it to 0": dropout != 0,
        "a sliding window (--window-size)": config.window_size is not None,
        f"--softmax-type {config.softmax_type}: use vanilla": config.softmax_type != "vanilla",
        "--qk-clip or --log-max-attention-logit": config.qk_clip or config.log_max_attention_logit,
        "FP8 attention": config.fp8_dot_product_attention or config.fp8_multi_head_attention,
        "--batch-invariant-mode": config.batch_invariant_mode,
        "CUDA graphs (--cuda-graph-impl)": config.cuda_graph_impl != "none",
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise ValueError(f"{runtime.settings().asked} does not support {'; '.join(found)}")


def _unsupported_call(
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    mask_type: AttnMaskType,
    attention_bias: Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> str | None:
    if packed_seq_params is not None or query.dim() != 4:
        return "packed (THD) sequences: train on unpacked sequences"
    if attention_bias is not None:
        return "an attention bias"
    if mask_type not in _CAUSAL:
        return f"the attention mask type {mask_type.name}: it knows causal and no_mask"
    if attention_mask is not None:
        return (
            f"an attention mask tensor, got one of shape {tuple(attention_mask.shape)}: the mask follows from the mask "
            f"type, here {mask_type.name}. Pass None as attention_mask (--no-create-attention-mask-in-dataloader)"
        )
    if query.size(0) != key.size(0):
        return (
            f"a key/value cache: {query.size(0)} queries and {key.size(0)} keys. It is for training, not for inference"
        )
    return None
