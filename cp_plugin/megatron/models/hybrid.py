"""HybridModel specs for `gpt`, with Transformer Engine or without.

Megatron's hybrid spec requires Transformer Engine. The local one is made of the attention and the feed-forward half of
Megatron's local GPT layer, and of state-space layers with the same projections and norms.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as with_transformer_engine
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from cp_plugin.megatron.compat import find
from cp_plugin.megatron.mixers import gated_delta_net, mamba
from cp_plugin.megatron.mixers.table import MIXERS

_, MambaLayer = find("megatron.core.ssm.mamba_layer:MambaLayer")
_, MambaLayerSubmodules = find("megatron.core.ssm.mamba_layer:MambaLayerSubmodules")
_, MambaMixer = find(mamba.MIXER.layer)
_, MambaMixerSubmodules = find("megatron.core.ssm.mamba_mixer:MambaMixerSubmodules")
_, GatedDeltaNet = find(gated_delta_net.MIXER.layer)
_, GatedDeltaNetSubmodules = find("megatron.core.ssm.gated_delta_net.common:GatedDeltaNetSubmodules")
_, MLPLayer = find("megatron.core.ssm.mlp_layer:MLPLayer")


def use_local_spec(spec: ModuleSpec, config: Any, pattern: str) -> ModuleSpec:
    """A script's spec for CPU mode: the local one instead of Transformer Engine's.

    Raises:
        ValueError: for layers of the pattern whose kernels exist for CUDA only.
    """
    for mixer in (one for one in MIXERS if one.kernels and one.letter in pattern):
        modules = [sys.modules[base.__module__] for base in find(mixer.layer)[1].__mro__]
        if not all(getattr(module, mixer.kernels, True) for module in modules):
            raise ValueError(
                f"{mixer.letter} in --hybrid-layer-pattern {pattern}: the kernels of {mixer.name} run only on CUDA. "
                f"Train on a GPU, or try a pattern without {mixer.letter}"
            )
    return stack_spec(config) if spec is with_transformer_engine else spec


def stack_spec(config: Any) -> ModuleSpec:
    """The spec for ``--transformer-impl``."""
    return with_transformer_engine if config.transformer_impl == "transformer_engine" else local_stack_spec(config)


def local_stack_spec(config: Any) -> ModuleSpec:
    """A spec of Megatron's own modules only."""
    backend = LocalSpecProvider()
    norm, column, row = _norm(config), backend.column_parallel_linear(), backend.row_parallel_linear()
    dense, experts = _halves(config, None), _halves(config, config.num_moe_experts)
    latent = _halves(config, None, latent=True)
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row),
    )
    layers: dict[str, ModuleSpec] = dict(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm,
                mixer=mixer,
                mamba_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        gdn_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=delta_net,
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
            ),
        ),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=dense[0]),
        mla_layer=ModuleSpec(module=TransformerLayer, submodules=latent[0]),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=dense[1]),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts[1]),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[get_mtp_layer_spec(None, False)]),
        ),
    )
    known = {field.name for field in fields(HybridStackSubmodules)}
    stack = HybridStackSubmodules(**{name: layer for name, layer in layers.items() if name in known})
    return ModuleSpec(module=_LocalStack, submodules=stack)


def _halves(
    config: Any, experts: int | None, latent: bool = False
) -> tuple[TransformerLayerSubmodules, TransformerLayerSubmodules]:
    """The attention half and the feed-forward half of the local GPT layer; latent: of multi-latent attention."""
    whole = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization=config.normalization,
    ).submodules
    attention = replace(whole, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    feed_forward = replace(whole, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    return attention, feed_forward


def _norm(config: Any) -> Any:
    return LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")


class _LocalStack(HybridStack):
    """HybridStack with Megatron's final norm, where Megatron hard-codes Transformer Engine's."""

    def __init__(self, config: Any, submodules: HybridStackSubmodules, **more: Any) -> None:
        wanted = more.pop("post_layer_norm", True)
        super().__init__(config, submodules, post_layer_norm=False, **more)
        self.post_layer_norm = wanted
        if wanted and self.post_process:
            self.final_norm = _norm(config)(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
