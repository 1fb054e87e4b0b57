"""Which CUDA graphs Megatron may capture: those of parts in which neither attention nor a relayout of tokens is.

    --cuda-graph-impl    what is captured
    transformer_engine   of a layer its attention (attn) or its MLP: dense (mlp), of experts (moe), or their first half
                         (moe_router, moe_preprocess); a Mamba layer (mamba)
    local                in HybridModel the same, in GPTModel no MLP of experts; for mlp layers as a whole, at whose
                         building Megatron stops, 0.20 included
    full_iteration       a step (in 0.17 a scope of local)

Where no part is named, layers are captured as a whole.
"""

from __future__ import annotations

from typing import Any

from cp_plugin.megatron.rules.rule import Found, Rule

_EXPERTS = ("moe", "moe_router", "moe_preprocess")
OUTSIDE = {"transformer_engine": ("mlp", *_EXPERTS), "local": _EXPERTS}
"""Value of ``--cuda-graph-impl`` -> the parts whose capture holds nothing of the plugin's."""
_CAPTURED = {
    "attn": "attention",
    "mamba": "the relayout of Mamba's tokens",
    "mlp": "layers as a whole",
    "full": "layers as a whole",
    "full_iteration": "whole steps",
}
"""Of all other parts: what is captured."""


def _captured(subject: Any) -> Found:
    args = subject.args
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    if impl == "none":
        return None
    named = _named(args)
    parts = named or ["full_iteration" if impl == "full_iteration" else "full"]
    inside = [part for part in parts if part not in OUTSIDE.get(impl, ())]
    if not inside:
        return None
    flag = "--cuda-graph-modules" if hasattr(args, "cuda_graph_modules") else "--cuda-graph-scope"
    return {
        "asked": " ".join([impl, flag, *named] if named else [impl]),
        "captured": " and ".join(_CAPTURED.get(part, part) for part in inside),
        "flag": flag,
    }


def _named(args: Any) -> list[str]:
    """The parts. Their flag has another name since 0.18, and the old one until Megatron's validation."""
    found = (getattr(args, f"cuda_graph_{name}", None) for name in ("modules", "scope_deprecated", "scope"))
    given = next(filter(None, found), [])
    if isinstance(given, str):
        given = given.split(",")
    parts = given if isinstance(given, list | tuple) else [given]
    return [name for part in parts if (name := getattr(part, "name", part)) != "full"]


CUDA_GRAPH = Rule(
    name="--cuda-graph-impl",
    what="--cuda-graph-impl {asked}",
    why="it captures {captured}, and context parallelism cannot communicate in a CUDA graph yet",
    fix="use --cuda-graph-impl transformer_engine {flag} with mlp, moe, or moe_router, or leave it out",
    looks_at=_captured,
)
