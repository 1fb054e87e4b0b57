"""The support matrix: supported cells train a step as without context parallelism, the others are refused.

A run may cover several features. Models with linear layers are compared with themselves on one rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import support
from nightly import each_value, one_case
from textbook import MLA
from training import MODEL, PACKED, SHORT, check, train

from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import RankError

MHA = MODEL.replace("--group-query-attention --num-query-groups 2 ", "")
SOFTMAX, LINEAR = (providers.names(kind) for kind in ("softmax", "linear"))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of one step."""

    proves: tuple[str, ...]
    """Features."""
    flags: str = ""
    stock: str | None = None
    """Stock Megatron's flags for the same model; None: the same."""
    model: str = MODEL


RUNS = (
    Run(proves=("causal, as many key as query heads",), model=MHA),
    Run(
        proves=("grouped queries", "sliding window", "softmax offset (sink)"),
        flags="--window-size 20,0 --softmax-type learnable",
    ),
    Run(
        proves=("one key head", "packed documents"),
        flags=f"{PACKED} --num-query-groups 1",
        stock="--reset-position-ids --reset-attention-mask --num-query-groups 1",
    ),
)
MLA_RUN = "values of another size (MLA)"
LINEAR_RUNS = (
    Run(proves=("causal, as many key as query heads",), model=MHA),
    Run(proves=("grouped queries",)),
    Run(proves=("one key head",), flags="--num-query-groups 1"),
    Run(proves=("packed documents",), flags=PACKED),
)
REFUSED = {
    "sliding window": "--window-size 20,0",
    "softmax offset (sink)": "--softmax-type learnable",
    "packed documents": PACKED,
    MLA_RUN: "--multi-latent-attention --kv-lora-rank 16",
}
pytestmark = pytest.mark.usefixtures("adapter")


same = functools.partial(check, cp=2, steps=1, documents=SHORT)


def promised(provider: str, features: tuple[str, ...]) -> bool:
    """Whether the matrix supports these cells; they must agree."""
    found = {support.cells(feature)[provider] is None for feature in support.FEATURES if feature.name in features}
    assert len(found) == 1, "a run proves cells of one kind"
    return found.pop()


@each_value
@pytest.mark.parametrize("run", RUNS, ids=lambda run: " and ".join(run.proves))
@pytest.mark.parametrize("provider", SOFTMAX)
def test_softmax(provider: str, run: Run) -> None:
    assert promised(provider, run.proves)
    same(run.flags, f"--cp-provider {provider}", want=run.stock, model=run.model)


@one_case
@pytest.mark.parametrize("provider", SOFTMAX)
def test_softmax_with_mla(provider: str) -> None:
    assert promised(provider, (MLA_RUN,))
    check("--rope-type rope", f"--cp-provider {provider}", cp=2, steps=1, model=MLA)


@each_value
@pytest.mark.parametrize("run", LINEAR_RUNS, ids=lambda run: run.proves[0])
@pytest.mark.parametrize("provider", LINEAR)
def test_linear(provider: str, run: Run) -> None:
    if not promised(provider, run.proves):
        assert run.proves[0] in REFUSED, "its refusal is tested below"
        return
    same(f"--cp-linear-attention basic {run.flags}", f"--cp-linear-provider {provider}", model=run.model)


def _no_cells() -> list[tuple[str, str, str]]:
    rows = [(feature.name, support.cells(feature)) for feature in support.FEATURES]
    return [(name, provider, why) for name, row in rows for provider, why in row.items() if why is not None]


@one_case
@pytest.mark.parametrize(("feature", "provider", "reason"), _no_cells(), ids=lambda value: value.split(":")[0])
def test_unsupported_cells_are_refused(feature: str, provider: str, reason: str) -> None:
    assert provider in LINEAR
    flags = f"--cp-linear-attention basic --cp-linear-provider {provider} {REFUSED[feature]}"
    with pytest.raises(RankError) as raised:
        train(2, f"--context-parallel-size 2 {flags}")
    assert reason in str(raised.value), str(raised.value)[-500:]


def test_every_cell_is_tested() -> None:
    names = {feature.name for feature in support.FEATURES}
    assert {name for run in RUNS for name in run.proves} | {MLA_RUN} == names
    assert {run.proves[0] for run in LINEAR_RUNS} | set(REFUSED) == names
