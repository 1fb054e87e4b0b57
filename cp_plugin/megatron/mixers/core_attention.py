"""Core attention: the module that Megatron's layers build instead of their own (see ``spec``).

``CoreAttention`` has the parameters of Megatron's own and no extra state, so checkpoints are those of stock Megatron.
Histories of delayed FP8 scales are one more tensor per layer, which stock Megatron ignores.

Shapes: q ``[s/cp, b, h, d]``, k and v ``[s/cp, b, g, d]`` (h and g after tensor parallelism), out ``[s/cp, b, h * d]``;
for packed documents (THD) without b.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers import fp8_scaling as scaling
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.rules import layers as rules


class AnyCoreAttention(MegatronModule):
    """Megatron's core attention interface, and its checks, for every kind of attention."""

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
        **more: Any,
    ) -> None:
        """
        Args: those of Megatron's core attention classes; ``cp_comm_type`` (Transformer Engine's) and ``num_splits``
            (inference) are ignored.
            k_channels, v_channels: head sizes of keys and values; None: the model's.
            softmax_scale: None: ``d ** -0.5``. ``apply_query_key_layer_scaling`` changes nothing: it only protects
                half-precision scores, and these are float32.
            more: arguments of a later Megatron, which must be None or False.

        Raises:
            ValueError: for a layer that the plugin does not support.
        """
        super().__init__(config=config)
        rules.refuse_more(layer_number, more)
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.softcap = compat.softcap(config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        layer = rules.Layer(args=config, settings=runtime.settings(), attention_type=attention_type, dropout=dropout)
        rules.check_layer(rules.LAYER, layer)
        self.head_dim = config.kv_channels if k_channels is None else k_channels
        self.v_head_dim = config.kv_channels if v_channels is None else v_channels
        self.cp_group: dist.ProcessGroup | None = None
        """The context-parallel group of this layer; None: its tokens are not sharded."""
        if config.context_parallel_size > 1:
            self.cp_group = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
            if self.cp_group is None:
                raise ValueError(f"layer {layer_number} of a context-parallel model: its pg_collection has no cp group")
        tensor_parallel = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
        self.tp_group = tensor_parallel if pg_collection is None else pg_collection.tp

    @property
    def context_parallel(self) -> ContextParallel:
        if self.cp_group is None:
            return runtime.alone(self.kind)
        return runtime.context_parallel(self.cp_group, self.kind)

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
        **more: Any,
    ) -> Tensor:
        """Attend; ``attn_mask_type`` (causal or none), the layer's window and packed documents make the mask.

        Raises:
            ValueError: for an attention bias, a mask tensor (even a causal one), a key/value cache, shapes that the
                layout cannot divide, a batch that was not sliced in the layout, or arguments of a later Megatron.
        """
        rules.refuse_more(self.layer_number, more)
        cp, mask_type = self.context_parallel, self.attn_mask_type if attn_mask_type is None else attn_mask_type
        call = query, key, attention_mask, mask_type, attention_bias, packed_seq_params, cp.layout.name
        rules.check_call(self.layer_number, runtime.settings(), *call)
        causal, batch = rules.CAUSAL[mask_type.name], self.micro_batch(packed_seq_params, query.size(0))
        if packed_seq_params is None:
            return self.attend(batch, query, key, value, causal=causal).flatten(2)
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return self.attend(batch, query, key, value, causal=causal).squeeze(1).flatten(1)

    def micro_batch(self, packed: PackedSeqParams | None, tokens: int) -> MicroBatch:
        """Return the micro-batch of one call; tokens: on this rank."""
        cp = self.context_parallel
        return MicroBatch.attended(cp, packed, tokens * cp.size, self.layer_number)

    @abstractmethod
    def attend(self, batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Attention of this rank's tokens to all: ``[s/cp, b, h, d]``."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Weights, sharded by heads over tensor-parallel ranks; states of quantisers and scaling."""
        weights = self.named_parameters()
        return make_sharded_tensors_for_checkpoint(
            {**self.state_dict(keep_vars=True), **scaling.to_save(self)},
            prefix,
            {name: 0 for name, weight in weights if getattr(weight, "tensor_model_parallel", False)},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Transformer Engine's attention leaves an empty extra state in plain checkpoints
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class CoreAttention(AnyCoreAttention):
    """Softmax attention over the whole sequence by the chosen provider."""

    kind = "softmax"

    def __init__(self, config: TransformerConfig, layer_number: int, *positional: Any, **named: Any) -> None:
        super().__init__(config, layer_number, *positional, **named)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if windowed else None
        self.softmax_offset = _softmax_offset(config)
        self.scaling = scaling.make_scaling(config)
        if self.scaling is not None:
            self.register_load_state_dict_pre_hook(scaling.load)

    def attend(self, batch: MicroBatch, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        return batch.cp.attention(
            query,
            key,
            value,
            causal=causal,
            scale=self.softmax_scale,
            softcap=self.softcap,
            window=self.window,
            cu_seqlens=batch.bounds,
            sink=self.softmax_offset,
            scaling=self.scaling if batch.cp.options.fp8 == "compute" else None,
        )


def _softmax_offset(config: TransformerConfig) -> Tensor | torch.nn.Parameter | None:
    """An extra score for each head of this rank: 0 for ``off-by-one``, a parameter for ``learnable``."""
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
    zeros = torch.zeros(heads, device=device, dtype=config.params_dtype)
    if config.softmax_type == "off-by-one":
        return zeros
    offset = torch.nn.Parameter(zeros)
    set_tensor_model_parallel_attributes(offset, True, 0, 1)
    if config.perform_initialization:
        config.init_method(offset)
    return offset


MIXER = Mixer(name="attention", kind="softmax", computes=lambda module: isinstance(module, CoreAttention))
