"""Fields of the configuration that Megatron's own attention and state-space layers read, and the plugin may not know.

What they read is found in the installed source, so a field of a later version or a fork is refused by name if it has
another value than its default, until it is in this table: trained without it, losses would be wrong without an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from cp_plugin.megatron.rules.rule import NAMES, Match, Rule, shown, when

_HONOURED = """
activation_func add_bias_linear add_qkv_bias apply_rope_fusion attention_dropout attention_output_gate
attn_logit_softcapping beta_fast
beta_slow bf16 bias_dropout_fusion context_parallel_size fp16 fp32_residual_connection fp4 fp8 fp8_recipe
fused_single_qkv_rope head_wise_attn_gate hidden_dropout hidden_size init_method kv_channels kv_lora_rank
layernorm_epsilon linear_conv_kernel_dim linear_cp_mode linear_key_head_dim linear_num_key_heads
linear_num_value_heads linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim
mamba_training_ssm_states_dtype mrope_interleaved mrope_section mscale mscale_all_dim multi_latent_attention
no_rope_freq num_attention_heads num_query_groups original_max_position_embeddings output_layer_init_method
params_dtype perform_initialization q_lora_rank qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim
recompute_granularity recompute_modules rope_type rotary_base rotary_base_per_layer rotary_interleaved rotary_percent
rotary_scaling_factor sequence_parallel softmax_scale softmax_type tensor_model_parallel_size use_cpu_initialization
use_mamba_mem_eff_path v_head_dim virtual_pipeline_model_parallel_size window_attn_skip_freq window_size
"""
_HARMLESS = """
apply_query_key_layer_scaling attention_softmax_in_fp32 cuda_graph_impl cuda_graph_modules cuda_graph_scope
deterministic_mode flash_attention_version flash_decode inference_cuda_graph_scope masked_softmax_fusion
offload_modules qk_clip_alpha qk_clip_threshold test_mode
"""
KNOWN = {name: "honoured" for name in _HONOURED.split()} | {name: "harmless" for name in _HARMLESS.split()}
"""Honoured: by the plugin's attention, by its rules of layers, or by parts of Megatron's layers that stay. Harmless: it
chooses among kernels with the same result, or means nothing without a flag that has a rule."""
_FILES = ("transformer/attention.py", "transformer/dot_product_attention.py", "transformer/multi_latent_attention.py")
_FOLDERS = ("ssm", "ops/ssm")
_READ = re.compile(r"(?:config|cfg)\.(\w+)|\b(?:get|has)attr\(\s*[\w.]*(?:config|cfg),\s*[\"'](\w+)[\"']")
"""``config.x``, and ``getattr(config, "x")``."""
_ENGINE, _ITS_ATTENTION = "extensions/transformer_engine.py", "TEDotProductAttention"


@lru_cache(maxsize=4)
def read(core: Path) -> frozenset[str]:
    """Attributes that these layers read of a configuration; core: the folder of ``megatron.core``."""
    files = [core / file for file in _FILES]
    files += [file for folder in _FOLDERS for file in sorted((core / folder).rglob("*.py"))]
    for file in list(files):  # and what was put in the place of its functions
        module = sys.modules.get(".".join(("megatron.core", *file.relative_to(core).with_suffix("").parts)))
        kinds = [vars(kind).values() for kind in vars(module).values() if isinstance(kind, type)] if module else []
        codes = {one.__code__.co_filename for kind in kinds for one in kind if isinstance(one, FunctionType)}
        files += [Path(code) for code in codes if code.endswith(file.name) and code != str(file)]
    texts = {file: file.read_text(encoding="utf-8") for file in (*files, core / _ENGINE) if file.exists()}
    engine = re.search(rf"^( *)class {_ITS_ATTENTION}\b.*\n(?:\1 +.*\n| *\n)*", texts.pop(core / _ENGINE, ""), re.M)
    matches = _READ.findall("\n".join([*texts.values(), engine[0] if engine else ""]))
    return frozenset(name for pair in matches for name in pair if name)


def _unknown(subject: Any) -> Match:
    args, spec = subject.args, find_spec("megatron.core")
    if spec is None:
        return None
    changed = {name: value for name, (value, default) in _others(args).items() if not _same(value, default)}
    if changed:
        theirs = read(Path(next(iter(spec.submodule_search_locations or ()))))
        changed = {name: value for name, value in changed.items() if name in theirs}
    if changed and is_dataclass(args):
        changed = _not_derived(args, changed)
    flags = ", ".join(f"--{name.replace('_', '-')}{shown(value)}" for name, value in changed.items())
    return when(changed, flags=flags, names=", ".join(changed))


def _others(args: Any) -> dict[str, tuple[Any, Any]]:
    """Field -> value and default, of all that no table names."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    refused = {name.removeprefix("--").replace("-", "_") for name in NAMES}
    others = {}
    for field in fields(args if is_dataclass(args) else MLATransformerConfig):
        value = getattr(args, field.name, None)
        if value is None or field.name in KNOWN or field.name in refused:
            continue
        factory = field.default_factory
        others[field.name] = value, field.default if factory is MISSING else factory()
    return others


def _not_derived(config: Any, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that the configuration computes itself from others."""
    try:
        fresh = replace(config, **{name: default for name, (_, default) in _others(config).items() if name in changed})
    except Exception:  # a configuration that cannot be made twice
        return dict(changed)
    return {name: value for name, value in changed.items() if not _same(getattr(fresh, name), value)}


def _same(a: Any, b: Any) -> bool:
    return a is b or bool(a == b) or (not a and not b)


UNKNOWN = Rule(
    name="fields that the plugin does not know",
    example="--add-qkv-bias",
    what="{flags}",
    why="Megatron's own attention or state-space layers read {names} of the configuration, and the plugin would train "
    "as if without it",
    fix="leave it out",
    looks_at=_unknown,
)
