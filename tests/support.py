"""The support matrix: features of models and batches against providers.

A cell is the answer of ``providers.unsupported``, so docs/support.md cannot promise what the code refuses. Tests train
a step of Megatron for each supported cell; the parity runs train them against upstream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.rules import cuda_graphs, experts, layers, layout, models
from cp_plugin.megatron.rules.rule import Rule

_TYPICAL = Problem(size=4, heads=16, kv_heads=16, head_dim=128, seq_length=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature of attention that a model or a batch may need."""

    name: str
    flags: tuple[str, ...] = ()
    """Alternative Megatron flags that enable it."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes to a typical ``Problem``."""
    not_linear: Rule | None = None
    """The rule that refuses it with linear attention, if the ``Problem`` does not show it."""

    @property
    def problem(self) -> Problem:
        """A typical attention call with the feature."""
        return replace(_TYPICAL, **self.changes)


FEATURES = (
    Feature(name="causal, as many key as query heads"),
    Feature(name="grouped queries", flags=("--group-query-attention --num-query-groups G",), changes={"kv_heads": 4}),
    Feature(name="one key head", flags=("--group-query-attention --num-query-groups 1",), changes={"kv_heads": 1}),
    Feature(name="sliding window", flags=("--window-size L,0",), changes={"window": (1023, 0)}),
    Feature(name="packed documents", flags=("--dataloader-inter-document-masking",), changes={"documents": True}),
    Feature(
        name="softmax offset (sink)",
        flags=("--softmax-type learnable", "--softmax-type off-by-one"),
        changes={"sink": True},
    ),
    Feature(
        name="values of another size (MLA)",
        flags=("--multi-latent-attention",),
        changes={"head_dim": 192, "v_head_dim": 128},
        not_linear=layers.MLA,
    ),
)


def cells(feature: Feature) -> dict[str, str | None]:
    """Provider -> why not, or None if it is supported."""
    reasons = {}
    for name, provider in providers.registry().items():
        settled = providers.settle(provider, feature.problem, Options())
        reasons[name] = providers.unsupported(settled.provider, feature.problem, settled.options)
        if provider.kind == "linear" and feature.not_linear is not None:
            reasons[name] = reasons[name] or feature.not_linear.why
    return reasons


def table() -> str:
    """All cells in Markdown: a row per provider, a column per feature; reasons and the features' flags below."""
    columns = [cells(feature) for feature in FEATURES]
    rows = {f"`{name}`": [of_feature[name] for of_feature in columns] for name in providers.registry()}
    flags = [
        f"- {feature.name}: {', '.join(f'`{flag}`' for flag in feature.flags)}" for feature in FEATURES if feature.flags
    ]
    return "\n".join([_with_reasons(["", *(feature.name for feature in FEATURES)], rows), "", "Flags:", "", *flags])


def _with_reasons(head: Sequence[str], rows: Mapping[str, Iterable[str | None]]) -> str:
    """A table of ``yes`` (None) and ``no (1)``, and the numbered reasons below."""
    reasons: list[str] = []
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        shown = []
        for reason in row:
            if reason is not None and reason not in reasons:
                reasons.append(reason)
            shown.append("yes" if reason is None else f"no ({reasons.index(reason) + 1})")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))])


def graphs_table() -> str:
    """Megatron's CUDA graphs that are allowed, in Markdown: a row per part of a layer to capture."""
    lines = ["| megatron-core | parts | `transformer_engine` | `local` |", "|---|---|---|---|"]
    for part in (None, "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"):
        shown = f"`--cuda-graph-modules {part}`" if part else "no `--cuda-graph-modules`"
        cells = " | ".join(_graph(impl, part) for impl in cuda_graphs.OUTSIDE)
        lines.append(f"| {', '.join(VERSIONS)} | {shown} | {cells} |")
    return "\n".join(lines)


def _graph(impl: str, part: str | None) -> str:
    args = SimpleNamespace(cuda_graph_impl=impl, cuda_graph_modules=[part] if part else [])
    refusal = cuda_graphs.CUDA_GRAPH.looks_at(SimpleNamespace(args=args))
    return f"no: {refusal['captured']}" if refusal else "yes"


VERSIONS = ("0.18", "0.19", "0.20")
_RUN = {
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "num_experts": None,
    "calculate_per_token_loss": True,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_router_enable_expert_bias": False,
}
_EXPERTS = {"num_experts": 8}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPTModel, with MLA, multi-token prediction, experts, packed documents": {},
    "HybridModel with attention, MLA, Mamba, experts, prediction, packed documents": {"hybrid_layer_pattern": "M*+E"},
    "HybridModel with gated delta net (`G`)": {"hybrid_layer_pattern": "G*"},
    "experts with losses of their routers, where losses are summed per token": _EXPERTS | {"moe_aux_loss_coeff": 0.01},
    "experts with `--moe-router-enable-expert-bias`, padded": _EXPERTS | {"moe_router_enable_expert_bias": True},
}
"""Version-dependent feature -> arguments of a run with it."""


def versions_table() -> str:
    """Return refusals by version of megatron-core, in Markdown."""
    rows = {name: [_refused_in(version, args) for version in VERSIONS] for name, args in _MODELS.items()}
    return _with_reasons(["", *VERSIONS], rows)


def _refused_in(version: str, args: Mapping[str, Any]) -> str | None:
    """Why a run is refused with this version but not with others."""
    run = SimpleNamespace(
        args=SimpleNamespace(**_RUN | args),
        version=version,
        padding=2,
        layout=SimpleNamespace(name="striped"),
        settings=SimpleNamespace(pad_sequence=True),
    )
    for rule in (*models.RULES, *layout.RULES, *experts.RULES):
        if "{0.version}" in rule.why and rule.looks_at(run):
            return rule.why.replace("megatron-core {0.version}", "this version")
    return None
