"""Every method posts, on all ranks, what NCCL can carry out, and touches no buffer in flight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from equipment.nccl import programs
from equipment.nccl.model import Program, run_checked
from equipment.nccl.order import Trace
from linear_cases import DECAYS, LinearCase
from method_cases import METHODS
from nightly import NIGHT, nightly
from oracle import Case

from cp_plugin import Options, Problem
from cp_plugin.engine.comm import WHOLE
from cp_plugin.engine.methods import registry as providers

LINEAR = [(name, layout) for name in providers.names("linear") for layout in providers.get(name).layouts]
MANY = [16, *(pytest.param(size, marks=nightly) for size in (32, 64))]

CHOICES: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 8, {"intra_size": n, "layout": "zigzag"}) for name in ("burst", "double_ring") for n in (2, 4)),
    *(("burst", 6, {"intra_size": n, "backward": b, "layout": "striped"}) for n in (2, 3) for b in ("kv", "q")),
    *((name, 4, {"head_parallel": 2}) for name in ("ring", "striped", "burst", "double_ring", "attention2d", "usp")),
    ("burst", 8, {"head_parallel": 2, "intra_size": 2}),
    ("usp", 8, {"head_parallel": 4}),
    *(("attention2d", 8, {"grid": g, "layout": "striped", "head_groups": n}) for g in ((2, 4), (4, 2)) for n in (1, 2)),
    ("attention2d", 8, {"grid": (2, 2), "head_parallel": 2, "head_groups": 2, "layout": "contiguous"}),
    ("all_gather", 4, {"head_groups": 2}),
    *((name, 4, {"gradient_dtype": "model"}) for name in ("ring", "burst", "all_gather", "attention2d")),
    *((name, 4, {"fp8": "comm"}) for name in ("ring", "burst", "all_gather", "attention2d", "ulysses")),
    ("attention2d", 4, {"grid": (2, 2), "head_groups": 4, "layout": "striped"}),
]
"""Provider, ranks, and what a user may choose."""


def softmax(provider: str, size: int, case: Case, **options: Any) -> list[Trace]:
    axes, extra = programs.meshes(provider, size, case, **options)
    return run_connected(provider, programs.attention(provider, case, **options), axes, extra)


def run_connected(
    provider: str, program: Program[None], axes: dict[str, int], extra: tuple[str, ...] = ()
) -> list[Trace]:
    """The checked traces of a method, which gathers and sums along ``Provider.collective_axes`` and no others."""
    collective = providers.get(provider).collective_axes
    traces = run_checked(program, axes, extra, collective=collective)
    used = [one for trace in traces for one in trace.operations if one.number]  # the first connects
    assert used and {one.communicator.name for one in used} <= {*axes, *extra}
    gathered = {one.communicator.name for one in used if one.pieces[0].verb in ("all_gather", "reduce_scatter")}
    assert gathered == {axis for axis in collective if axes[axis] > 1}
    return traces


def small(size: int, **different: Any) -> Case:
    sizes = {"seq_length": 4 * size, "heads": 4, "kv_heads": 4, "causal": True, "batch": 1, "head_dim": 8}
    return Case(**sizes | {"v_head_dim": 8} | different)


def heads_for(provider: str, size: int) -> int:
    return size if provider in ("ulysses", "usp") else 4


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8] if NIGHT else [*(pytest.param(n, marks=nightly) for n in (2, 3)), 4])
@pytest.mark.parametrize(("provider", "layout"), METHODS)
def test_every_provider_and_layout(provider: str, layout: str, size: int) -> None:
    heads = 2 * heads_for(provider, size)
    softmax(provider, size, small(size, heads=heads, kv_heads=heads), layout=layout)


@pytest.mark.parametrize(("provider", "size", "options"), CHOICES, ids=str)
def test_options(provider: str, size: int, options: dict[str, Any]) -> None:
    smaller = options.keys() & {"gradient_dtype", "fp8"}
    dtype = torch.bfloat16 if smaller else torch.float64  # wide sums travel as they are
    softmax(provider, size, small(size, heads=8, kv_heads=8, dtype=dtype), **options)


@pytest.mark.parametrize("provider", ["ring", "striped", "burst", "all_gather", "attention2d", "usp"])
@pytest.mark.parametrize(
    "different", [{"window": (3, 0)}, {"documents": (0, 3, 8, 16)}, {"causal": False}, {"kv_heads": 1}], ids=str
)
def test_masks_under_which_ranks_have_different_work(provider: str, different: dict[str, Any]) -> None:
    """A rank whose queries see none of the keys that come by has to pass them on all the same."""
    if provider == "usp" and "kv_heads" in different:
        different = {"heads": 8, "kv_heads": 2}
    softmax(provider, 4, small(4, **different))


@pytest.mark.parametrize("size", MANY)
@pytest.mark.parametrize(
    ("provider", "layout"),
    [pytest.param(*m, marks=() if m[1] == providers.get(m[0]).layouts[0] else nightly) for m in METHODS],
)
def test_many_ranks(provider: str, layout: str, size: int) -> None:
    heads = heads_for(provider, size)
    with programs.cheap_kernels():
        softmax(provider, size, small(size, heads=heads, kv_heads=heads, causal=layout != "zigzag"), layout=layout)


@pytest.mark.parametrize("size", MANY)
@pytest.mark.parametrize("inner", [2, 4, 8])
def test_many_ranks_in_nested_rings(inner: int, size: int) -> None:
    with programs.cheap_kernels():
        for backward in ("kv", "q"):
            softmax("burst", size, small(size), intra_size=inner, backward=backward)


@pytest.mark.parametrize("size", [pytest.param(2, marks=nightly), 3, 4, pytest.param(8, marks=nightly), *MANY[1:]])
@pytest.mark.parametrize(("provider", "layout"), LINEAR)
def test_linear_methods(provider: str, layout: str, size: int) -> None:
    few = not NIGHT or size > 8
    for decay in ("none", "token") if few else DECAYS:
        for documents in (False,) if few and decay == "none" else (False, True):
            case = LinearCase(decay=decay, documents=documents, seq_length=4 * size if size > 4 else 24)
            sizes = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}
            problem = Problem(size=size, decay=decay, documents=documents, causal=case.causal, **sizes)
            if providers.get(provider).unsupported(problem, Options()) is None:
                run_connected(provider, programs.linear_attention(provider, case, layout), {"cp": size})


@pytest.mark.parametrize("size", [*range(2, 17), 33, 64])
def test_the_tree_of_a_decoded_token(size: int) -> None:
    run_checked(programs.decoded, {"cp": size})


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=nightly) for n in (2, 3)), 4, 5])
@pytest.mark.parametrize(("provider", "layout"), [("ring", "zigzag"), ("attention2d", "striped"), ("burst", "zigzag")])
def test_prefill_and_decoding(provider: str, layout: str, size: int) -> None:
    axes, extra = programs.meshes(provider, size, small(size), layout=layout)
    run_checked(programs.session(provider, size, layout), axes, extra)


@pytest.mark.parametrize("size", [2, 4, 6, *MANY])
@pytest.mark.parametrize(("provider", "layout"), [("ring", "zigzag"), ("ring", "contiguous"), ("striped", "striped")])
def test_the_shift_of_multi_token_prediction(provider: str, layout: str, size: int) -> None:
    case = small(size)
    axes, extra = programs.meshes(provider, size, case, layout=layout)
    run_checked(programs.shifted(provider, size, layout), axes, {*extra, WHOLE})


def test_a_trace_is_what_is_posted() -> None:
    """Two layers of a ring of four: k, v in three hops forward; in the backward their gradients, too, in as many."""
    (first, *_) = softmax("ring", 4, small(4), layout="zigzag")
    assert not any(one.collective for one in first.operations), "connected by an exchange"
    phases = Counter(one.phase for one in first.operations[1:])
    assert phases == {"forward": programs.LAYERS * 3, "backward": programs.LAYERS * (3 + 3)}
    assert {str(piece) for piece in first.operations[1].pieces} == {
        "receive from rank 3 of 128 x float64",
        "send to rank 1 of 128 x float64",
    }
