"""Tiny transformers models, and their loss and gradients on several ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import run_ranks

try:
    import transformers
except ImportError:
    transformers = None
MISSING = "transformers is not installed: pip install 'cp-plugin[huggingface]' (ci/huggingface.sh)"
needs_transformers = pytest.mark.skipif(transformers is None, reason=MISSING)


def model_of(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A causal language model of transformers' ``model_type`` kind, always with the same weights."""
    return built(config_of(kind, **more), dtype)


def tokens(length: int = 64, rows: int = 2) -> torch.Tensor:
    """Token ids ``[rows, length]``."""
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(1))


def pack(*lengths: int) -> dict[str, torch.Tensor]:
    """One row of documents, as ``DataCollatorWithFlattening`` makes it."""
    ids, positions = tokens(sum(lengths), 1), torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    """The documents of this pack as padded rows: transformers makes some masks without positions, and its linear layers
    mix the documents of a pack on a CPU."""
    ids, labels = (pack(*lengths)[key][0].split(lengths) for key in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
        "num_items_in_batch": torch.tensor(sum(lengths) - len(lengths)),
    }


class Trained(NamedTuple):
    """The loss, summed over ranks, and its gradients by name of the parameter, likewise; float64."""

    loss: float
    gradients: dict[str, torch.Tensor]


def train(model: Any, batch: dict[str, Any], forward: Callable[..., Any] | None = None) -> Trained:
    """On this rank alone."""
    model.zero_grad()
    loss = (forward or model)(**batch).loss
    loss.backward()
    gradients = {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double().clone()
        for name, p in model.named_parameters()
    }
    return Trained(loss.item(), gradients)


def summed(part: Trained) -> Trained:
    """Over the ranks."""
    loss = torch.tensor(part.loss, dtype=torch.float64)
    for x in (loss, *part.gradients.values()):
        dist.all_reduce(x)
    return Trained(loss.item(), part.gradients)


def divided(cp: ContextParallel, kind: str = "llama", **options: Any) -> Any:
    """A model, divided over the ranks; options: of ``apply``."""
    huggingface.apply(model := model_of(kind), cp, **options)
    return model


def difference(many: Trained, one: Trained) -> float:
    """The largest relative difference of the loss or a gradient. Gradients a thousand times smaller than the largest
    are rounding, as those of decays that let nothing through."""
    floor = 1e-3 * max(float(x.norm()) for x in one.gradients.values())
    errors = [abs(many.loss - one.loss) / abs(one.loss)]
    for name, x in one.gradients.items():
        errors.append(float((many.gradients[name] - x).norm() / x.norm().clamp_min(floor)))
    return max(errors)


def compare(model: Any, batch: dict[str, Any], one: Trained, forward: Callable[..., Any] | None = None) -> float:
    """How far the ranks of the default group are from one, this rank with its part of the batch."""
    return difference(summed(train(model, batch, forward)), one)


def run_on_ranks(
    rank: Callable[[ContextParallel], Any], provider: str = "ring", ranks: int = 2, **options: Any
) -> list[Any]:
    """What each rank returns of a function of the ``ContextParallel`` of all of them."""
    return run_ranks(
        lambda: rank(ContextParallel(provider, group=dist.group.WORLD, **options)), ranks, init_process_group=True
    )


def differs(
    model: Any,
    provider: str = "ring",
    ranks: int = 2,
    whole: dict[str, torch.Tensor] | None = None,
    packed: dict[str, Any] | None = None,
    one: Trained | None = None,
    then: Callable[[Any], Any] = lambda model: model,
    call: Callable[[Any], Callable[..., Any]] = lambda model: model,
    **options: Any,
) -> float:
    """How far ``ranks`` ranks are from one.

    Args:
        whole: the batch on one rank; None: ``tokens()``, their own labels.
        packed: arguments of ``shard`` for the same batch; None: ``whole``.
        one: what the batch gives on one rank; None: what this model gives there.
        then: what a user does to the divided model; returns the one to train.
        call: of a model, on one rank, too: what is called instead of it.
    """
    whole = {"input_ids": tokens(), "labels": tokens()} if whole is None else whole
    one = train(model, whole, call(model)) if one is None else one

    def rank(cp: ContextParallel) -> float:
        huggingface.apply(model, cp)
        used = then(model)
        return compare(used, huggingface.shard(cp, **packed or whole), one, call(used))

    return max(run_on_ranks(rank, provider, ranks, **options))


def raised(call: Callable[[], object]) -> str:
    """What the ValueError says that a call raises."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def refusal(model: Any, provider: str = "ring", ranks: int = 2, **options: Any) -> str:
    """What ``apply`` says on every rank."""
    return run_on_ranks(lambda cp: raised(lambda: huggingface.apply(model, cp)), provider, ranks, **options)[0]


class Around(torch.nn.Module):
    """A layer, in whose place a function is called: of this module and the layer's input."""

    def __init__(self, layer: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor, *args: Any, **named: Any) -> Any:
        return self.call(self, x, *args, **named)


DRAWS = ("dropout", "pdrop", "drop_rate", "layerdrop", "jitter")
"""Parts of the names of settings by which a model draws random numbers."""
SIZES: dict[str, Any] = {
    **{name: 64 for name in ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim")},
    **{name: 96 for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dense_intermediate_size")},
    **{name: 2 for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_experts_per_tok", "top_k")},
    **{name: 4 for name in ("num_attention_heads", "n_head", "n_heads", "num_heads")},
    **{name: 4 for name in ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_layer")},
    **{name: 32 for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")},
    **{name: 16 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "sliding_window")},
    **{name: 16 for name in ("linear_key_head_dim", "linear_value_head_dim", "hidden_size_per_layer_input")},
    **{name: 1 for name in ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_dense_layers")},
    **{"vocab_size": 97, "num_key_value_heads": 2, "head_dim": 16, "qk_rope_head_dim": 8, "tie_word_embeddings": False},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"linear_num_heads": 4, "linear_head_dim": 16},
    **{name: 16 for name in ("mamba_d_head", "mamba_d_state", "mamba_headdim", "state_size", "mamba_head_dim")},
    **{"mamba_n_heads": 8, "n_mamba_heads": 2, "mamba_num_heads": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    **{"use_cache": False, "attention_chunk_size": 32, "max_position_embeddings": 256, "n_positions": 256},
}

OWN_SIZES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    **{name: {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1} for name in ("gemma2", "vaultgemma")},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 2, "laurel_rank": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": 128},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 32, "num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "qwen4_exp_text": {
        **{"layer_types": ["linear_attention"] * 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ngram_vocab_size_base": 50},
        **{"split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    },
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}
"""Of families that those above do not fit."""


def config_of(kind: str, **more: Any) -> Any:
    """A tiny config of any ``model_type``: the settings it has, of those above, without anything random in training.

    A test that asks for it is skipped without transformers, or with one that does not know the kind.

    Raises:
        Exception: where no such config can be built into a model.
    """
    if transformers is None:
        pytest.skip(MISSING)
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in kinds:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    usual = kinds[kind]()
    chosen = {name: x for name, x in SIZES.items() if _has(usual, name)}
    if vars(usual).get("layer_types"):
        chosen["layer_types"] = _first(usual.layer_types)
    chosen |= OWN_SIZES.get(kind, {})
    chosen["pad_token_id"] = 0  # some configs of transformers 5.0 have none by default
    chosen |= {name: 0.0 for name in vars(usual) if any(part in name for part in DRAWS) and name not in chosen}
    failure: Exception | None = None
    for unset in ((), ("head_dim",), ("num_key_value_heads",), ("num_key_value_heads", "head_dim")):
        try:
            config = kinds[kind](
                **{name: x for name, x in (chosen | more).items() if name in more or name not in unset}
            )
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
            if size > 20_000_000:
                raise ValueError(f"{size} parameters: some size is not among those above")
            with torch.no_grad():
                built(config)(input_ids=tokens(8))
            return config
        except Exception as error:
            failure = error
    assert failure is not None
    raise failure


def _has(config: Any, name: str) -> bool:
    """Also for a setting of each layer, which cannot be read from the whole config."""
    try:
        return hasattr(config, name)
    except Exception:
        return True


def _first(kinds: list[str]) -> list[str]:
    """Two layers, of two kinds if there are."""
    return [kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0])]


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model in training mode, always with the same weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
