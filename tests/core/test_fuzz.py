"""Random configurations against the float64 oracle: each is refused with a reason, or right.

    ci/fuzz.sh [NUMBER]      that many of them; a slice runs with the other tests

Below float64, errors may be twice those of the same kernel on one device plus the roundings of narrow sums, if that is
more than the limit. Hypothesis prints the smallest failing configuration and the seed to repeat it.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from oracle import Case, Result, errors
from thread_ranks import on_threads, run, typical
from tree_cases import trees

from cp_plugin import ContextParallel, Options
from cp_plugin.attention.setups import Setup
from cp_plugin.methods import registry as providers
from cp_plugin.placement.layouts import ALL
from cp_plugin.testing.verify import of_sums

EXAMPLES = int(os.environ.get("CP_PLUGIN_FUZZ", "60"))
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@st.composite
def documents(draw: st.DrawFn, tokens: int) -> tuple[int, ...]:
    inner = draw(st.lists(st.integers(1, tokens - 1), max_size=6))
    return (0, *sorted(set(inner)), tokens) if inner else ()


def tree(draw: st.DrawFn, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = draw(trees(tokens))
    return tuple(found.lengths), tuple(found.parents)


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, int, Case, dict[str, Any], bool]:
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tokens = 2 * size * draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    bound = st.sampled_from([-1, 0, 1, 2, 5, tokens])
    packed = draw(st.sampled_from(["documents", "documents", "a tree"]))
    alone = packed == "a tree"  # it goes with no other mask
    case = Case(
        seq_length=tokens,
        heads=kv_heads * draw(st.sampled_from([1, 2, 4])),
        kv_heads=kv_heads,
        causal=alone or draw(st.booleans()),
        dtype=draw(st.sampled_from(list(LIMITS))),
        batch=draw(st.integers(1, 2)),
        head_dim=8 * draw(st.integers(1, 3)),
        v_head_dim=8 * draw(st.integers(1, 3)),
        window=None if alone else draw(st.none() | st.tuples(bound, bound)),
        documents=() if alone else draw(documents(tokens)),
        tree=tree(draw, tokens) if alone else ((), ()),
        sink=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )
    name = draw(st.sampled_from(providers.names()))
    some = st.none() | st.sampled_from([1, 2, 3, 4])
    of_any = {
        "layout": st.none() | st.sampled_from(sorted(ALL)),
        "backend": st.sampled_from(["auto", "sdpa", "reference"]),
        "head_parallel": some,
    }
    of_some = {
        "grid": st.none() | st.sampled_from([(n, size // n) for n in range(1, size + 1) if size % n == 0]),
        "intra_size": some,
        "backward": st.sampled_from([None, "auto", "kv", "q"]),
        "head_groups": some,
        "gradient_dtype": st.sampled_from([None, None, "float32", "model"]),
    }
    own = {option: values for option, values in of_some.items() if option in providers.get(name).options}
    options = {option: draw(values) for option, values in (of_any | own).items()}
    return name, size, case, {k: v for k, v in options.items() if v is not None}, draw(st.booleans())


@given(configurations())
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), print_blob=True)
def test_refused_or_right(configuration: tuple[str, int, Case, dict[str, Any], bool]) -> None:
    name, size, case, options, recompute = configuration
    problem = typical(case, size)
    try:
        settled = providers.settle(name, problem, Options(**options))
    except ValueError as refused:
        assert str(refused)
        event("refused by settle")
        return
    if providers.unsupported(settled.provider, problem, settled.options) is not None:
        event("refused by unsupported")
        return
    event("computed")
    ranks = on_threads(name, size, case, recompute=recompute, **options)
    grads = [r.dsink for r in ranks if r.dsink is not None]
    got = ranks[0]._replace(dsink=sum(grads)) if grads else ranks[0]
    want = case.reference()
    rounding = of_sums(Setup(provider=settled.provider, problem=problem, options=settled.options))
    single = [0.0] * 5
    if case.dtype != torch.float64:
        single = errors_of(run(ContextParallel("ring", backend=options["backend"]), case), want)
    for field, error, alone in zip(Result._fields, errors_of(got, want), single, strict=False):
        allowed = max(LIMITS[case.dtype], 2 * alone + rounding.get(field, 0.0))
        assert error <= allowed, f"{field} is off by {error:.1e}, allowed {allowed:.0e}: {name} {size} {asdict(case)}"


def errors_of(got: Result, want: Result) -> list[float]:
    """Relative errors; absolute ones for results that are nearly zero."""
    found = errors(got, want)
    size = want.out.norm().item()
    for i, exact in enumerate(x for x in want if x is not None):
        if exact.norm() < 1e-6 * size:
            found[i] = (got[i].double() - exact).norm().item() / size
    return found
