"""Options: automatic choices with reasons, refusals with advice; and providers that cannot be registered.

A third party's method: ``tests/docs/test_docs.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import third_party

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import TraceMesh
from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.problem import Transport, describe_hosts
from cp_plugin.engine.core.spelling import flag_of, spell_as_arguments
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.attention2d import grid_bytes
from cp_plugin.engine.methods.registry import layout_for, settle

MHA, GQA = Problem(size=64, heads=32, kv_heads=32), Problem(size=64, heads=32, kv_heads=4)
UNMASKED = Problem(size=24, heads=8, kv_heads=8, causal=False)


@pytest.mark.parametrize(
    ("provider", "size", "options", "message"),
    [
        ("attention2d", 8, {"grid": (4, 4)}, "--cp-grid 4x4 does not hold 8 .* use one of 1x8, 2x4, 4x2, 8x1"),
        ("ring", 8, {"head_parallel": 3}, "--cp-head-parallel 3 does not divide 8 .* use one of 1, 2, 4, 8"),
        ("ring", 8, {"head_parallel": 0}, "--cp-head-parallel 0 does not divide 8"),
        ("ulysses", 8, {"head_parallel": 2}, "ulysses already splits the heads across all ranks"),
        ("burst", 8, {"intra_size": 3}, "--cp-intra-size 3 does not divide 8 .* use one of 1, 2, 4, 8"),
        ("burst", 8, {"intra_size": 0}, "--cp-intra-size 0 does not divide 8"),
        ("ring", 8, {"grid": (2, 4)}, "--cp-grid 2x4 has no effect with --cp-provider ring: .* use attention2d"),
        ("attention2d", 8, {"backward": "q"}, "--cp-backward q has no effect with .*attention2d.* use burst"),
        ("all_gather", 8, {"intra_size": 2}, "--cp-intra-size 2 has no effect .* use burst or double_ring"),
        (
            "attention2d",
            8,
            {"head_parallel": 2, "grid": (4, 2)},
            "does not hold 4 .*--cp-head-parallel 2 leaves that many",
        ),
        ("usp", 8, {}, "usp cannot split 1 query and 1 key/value heads across any subset of 8"),
        ("nothing", 8, {}, "--cp-provider nothing: choose one of"),
        ("striped", 8, {"layout": "zigzag"}, "does not run on the zigzag layout"),
        ("ring", 4, {"fp8": "both"}, "--cp-fp8 both: write comm, compute, or off"),
        ("ring", 4, {"fp8": "comm", "backend": "te_fp8"}, "--cp-backend te_fp8 computes in FP8: add --cp-fp8 compute"),
        ("ring", 4, {"fp8": "compute", "backend": "sdpa"}, "computes in FP8, which --cp-backend sdpa does not: use "),
        (
            "ulysses",
            4,
            {"gradient_dtype": "model"},
            "--cp-gradient-dtype model has no effect with --cp-provider ulysses: leave it out, or use all_gather, at",
        ),
        ("ring", 4, {"gradient_dtype": "bfloat16"}, "^--cp-gradient-dtype bfloat16: write float32, model, or auto$"),
    ],
)
def test_refused_before_anything_is_built(provider: str, size: int, options: dict[str, Any], message: str) -> None:
    """By flags as for Megatron, and by arguments as in Python; each names the value."""
    with pytest.raises(ValueError, match=message) as refused:
        settle(provider, Problem(size=size), Options(**options))
    with spell_as_arguments(), pytest.raises(ValueError) as in_python:
        settle(provider, Problem(size=size), Options(**options))
    flags, python = (str(caught.value) for caught in (refused, in_python))
    assert "--" not in python
    named = {name for name, value in options.items() if f"{flag_of(name)} {show_option(value)}" in flags}
    assert all(f"{name}={options[name]!r}" in python for name in named)


@pytest.mark.parametrize(
    ("provider", "problem", "options", "message"),
    [
        ("attention2d", Problem(size=24, heads=8, kv_heads=8), {"grid": (4, 6), "layout": "zigzag"}, "^None$"),
        *(("attention2d", UNMASKED, {"grid": (4, 6), "layout": name}, "^None$") for name in ("striped", "contiguous")),
        (
            "attention2d",
            Problem(size=24, heads=8, kv_heads=8),
            {"grid": (4, 6), "layout": "striped"},
            r"--cp-grid 4x6 with .* striped tokens: neither side .*--cp-layout zigzag, or .* that fit.*: "
            r"2x12 \(.*B\), 1x24 \(.*B\), 12x2 \(.*B\)",
        ),
        ("attention2d", Problem(size=8, heads=8, kv_heads=2), {"head_groups": 4}, "does not divide the 2 key/value"),
        ("attention2d", Problem(size=8, heads=8, kv_heads=2), {"head_groups": 0}, "--cp-head-groups 0 does not divide"),
        ("ulysses", Problem(size=8, heads=12, kv_heads=12), {}, "12 query and 12 .* across 8 ranks.*multiple of 24"),
        ("ring", Problem(size=8, heads=6, kv_heads=2), {"head_parallel": 4}, "--cp-head-parallel 4: 6 query and"),
    ],
)
def test_refused_for_this_model(provider: str, problem: Problem, options: dict[str, Any], message: str) -> None:
    settled = settle(provider, problem, Options(**options))
    assert re.search(message, str(settled.provider.unsupported(problem, settled.options)))


def test_the_grid_with_the_fewest_bytes() -> None:
    for problem, best in ((MHA, (8, 8)), (GQA, (16, 4)), (Problem(size=64, heads=32, kv_heads=1), (32, 2))):
        settled = settle("attention2d", problem, Options())
        assert settled.options.grid == best, problem
        legal = [(r, 64 // r) for r in (1, 2, 4, 8, 16, 32, 64)]
        assert grid_bytes(problem, Options(), best) == min(grid_bytes(problem, Options(), grid) for grid in legal)
        assert f"grid {best[0]}x{best[1]}" in settled.why[0] and "fewest bytes" in settled.why[0]
    why = settle("attention2d", GQA, Options()).why
    assert "8x8 would send" in why[0] and why[1].startswith("2 groups of heads overlap")


def test_the_side_that_travels_in_the_backward() -> None:
    assert settle("burst", MHA, Options()).options.backward == "q"
    settled = settle("burst", Problem(size=64, heads=32, kv_heads=16), Options())
    assert settled.options.backward == "kv" and "would be" in settled.why[-2]
    assert settle("burst", GQA, Options(backward="q")).options.backward == "q", "the user's word"


def test_two_rings_follow_the_hosts() -> None:
    def rings(hosts: str, **options: Any) -> providers.Resolved:
        return settle(
            "burst",
            Problem(size=len(hosts)).with_transport(hosts=tuple(hosts)),
            Options(backward="kv", gradient_dtype="float32", **options),
        )

    assert rings("aaaabbbb").options.intra_size == 4
    assert "two nested rings, 4 ranks on a host and 2 hosts: ranks 0-3 on a, 4-7 on b" in rings("aaaabbbb").why[0]
    assert rings("aaaa").options.intra_size == rings("abcd").options.intra_size == rings("aaabbbbb").options.intra_size
    assert rings("aaabbbbb").options.intra_size == 1, "uneven"
    assert rings("aaaabbbb", intra_size=2).why == ()
    warning, *_ = rings("aaaabbbb", intra_size=8).why
    assert warning.startswith("warning: --cp-intra-size 8 does not match the hosts: ranks 0-3")
    problem = Problem(size=8, heads=4, kv_heads=4).with_transport(hosts=tuple("aaaabbbb"))
    behind = settle("burst", problem, Options(head_parallel=2))
    assert behind.options.intra_size == 2, "of the four ranks on a host, two have the same heads"


def test_placement_in_words() -> None:
    assert [Transport(hosts=tuple(hosts)).per_host for hosts in ("aabb", "abab", "")] == [2, 1, 1]
    assert describe_hosts(("a", "a", "b")) == "ranks 0-1 on a, 2 on b"
    assert describe_hosts(()) == "the hosts of the ranks are unknown"


def test_usp_takes_the_heads_there_are() -> None:
    for heads, kv_heads, ranks in ((8, 8, 8), (32, 32, 32), (8, 2, 8)):
        settled = settle("usp", Problem(size=32, heads=heads, kv_heads=kv_heads), Options())
        assert settled.options.head_parallel == ranks
        assert settled.provider.axes(32, settled.options) == {"cp": 32 // ranks, "head": ranks}


def test_context_parallel_takes_options_by_name() -> None:
    cp = ContextParallel("attention2d", mesh=TraceMesh({"q": 2, "kv": 4}, 0), grid=(4, 2), head_groups=1)
    assert (cp.options.grid, cp.why) == ((4, 2), ())
    with pytest.raises(ValueError, match=r"unknown option gird: did you mean grid\? Choose one of backend, .*grid"):
        ContextParallel("attention2d", gird=(4, 2))
    with pytest.raises(ValueError, match="needs the mesh axes"):
        ContextParallel("attention2d", mesh=TraceMesh({"q": 2, "kv": 4}, 0), grid=(2, 4))
    with pytest.raises(ValueError, match="problem is for 4 context-parallel ranks, but there are 1"):
        ContextParallel("ring", problem=Problem(size=4))
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        Problem(size=4, heads=6, kv_heads=4)


def test_a_misspelt_option_is_an_error() -> None:
    assert Options(grid=(2, 2)).grid == (2, 2) and Options().grid is None
    with pytest.raises(AttributeError, match="no provider declares an option 'gird'"):
        _ = Options(grid=(2, 2)).gird


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    with third_party.looked_for_anew():
        yield


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "from cp_plugin.engine.methods.ring import STRIPED as THIRD",
            "two context-parallel providers are called 'striped'",
        ),
        ("THIRD = 'a ring'", "'third'.* is not a cp_plugin Provider"),
    ],
)
def test_what_cannot_be_registered(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third_party.install(tmp_path, "third_party_method", source, providers.ENTRY_POINTS, third="THIRD")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "third_party_method", raising=False)
    with pytest.raises(ValueError, match=said):
        providers.registry()


def test_layouts_default_to_the_providers_first() -> None:
    assert layout_for(providers.get("ring"), ContextParallel("ring").options).name == "zigzag"
    assert layout_for(providers.get("ring"), ContextParallel("ring", layout="contiguous").options).name == "contiguous"
    assert ContextParallel("striped").layout.name == "striped"
