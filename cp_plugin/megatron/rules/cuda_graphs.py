"""CUDA graphs: only parts of a layer without attention and without a relayout of tokens may be captured.

    --cuda-graph-impl    captures
    transformer_engine   attention (attn) or the MLP of a layer: dense (mlp), experts (moe) or their first half
                         (moe_router, moe_preprocess); a Mamba layer (mamba)
    local                the same in HybridModel; in GPTModel no MLP of experts; whole layers for mlp, at which
                         Megatron up to 0.20 fails
    full_iteration       a step

Without a named part, whole layers are captured.
"""

from __future__ import annotations

from typing import Any

from cp_plugin.megatron.rules.rule import Match, Rule

_EXPERTS = ("moe", "moe_router", "moe_preprocess")
OUTSIDE = {"transformer_engine": ("mlp", *_EXPERTS), "local": _EXPERTS}
"""``--cuda-graph-impl`` -> parts that can be captured without the plugin's communication."""
_CAPTURED = {
    "attn": "attention",
    "mamba": "the reordering of Mamba's tokens",
    "mlp": "whole layers",
    "full": "whole layers",
    "full_iteration": "whole steps",
}
"""Other parts -> description for the message."""


def _captured(subject: Any) -> Match:
    args = subject.args
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    if impl == "none":
        return None
    named = _named(args)
    parts = named or ["full_iteration" if impl == "full_iteration" else "full"]
    inside = [part for part in parts if part not in OUTSIDE.get(impl, ())]
    if not inside:
        return None
    flags = " ".join([impl, "--cuda-graph-modules", *named] if named else [impl])
    return {"flags": flags, "captured": " and ".join(_CAPTURED.get(part, part) for part in inside)}


def captures_experts(args: Any) -> bool:
    """Return True if graphs capture routers, into which no code of the plugin may come."""
    impl = getattr(args, "cuda_graph_impl", None) or "none"
    return impl != "none" and not {*_named(args)}.isdisjoint(_EXPERTS)


def _named(args: Any) -> list[str]:
    """The requested parts; the flag was renamed in 0.18, and keeps its old name until Megatron's validation."""
    values = (getattr(args, f"cuda_graph_{name}", None) for name in ("modules", "scope_deprecated", "scope"))
    chosen = next(filter(None, values), [])
    if isinstance(chosen, str):
        chosen = chosen.split(",")
    parts = chosen if isinstance(chosen, list | tuple) else [chosen]
    return [name for part in parts if (name := getattr(part, "name", part)) != "full"]


CUDA_GRAPH = Rule(
    name="--cuda-graph-impl",
    example="--cuda-graph-impl local",
    what="--cuda-graph-impl {flags}",
    why="it captures {captured}, and context parallelism cannot communicate in a CUDA graph yet",
    fix="use --cuda-graph-impl transformer_engine --cuda-graph-modules with mlp, moe or moe_router, or leave it out",
    looks_at=_captured,
)
