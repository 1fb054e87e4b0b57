"""Ranks that make different calls are told so.

Kind: nobody asks whether all ranks do the same. Another mask, scale or length on one rank raised nothing, or ended in a
message of the wrong size; training went on with a plausible loss. Public report: AutoModel 3359 (ranks of a
context-parallel group with other rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import each_value

from cp_plugin import ContextParallel, Tree
from cp_plugin.engine.attention.agreement import EVERY, FIRST, Calls
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.packs import place_documents, place_lengths
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.common.text import ranks_named
from cp_plugin.engine.inference import Session
from cp_plugin.testing.launch import run_ranks

LENGTH = 32
DOCUMENTS = torch.tensor([0, 8, 32])


def made(
    call: Callable[..., None], mesh: Mesh, *, provider: str = "", placed: Sequence[int] = (), **options: Any
) -> ContextParallel:
    cp = ContextParallel(
        provider or ("ring" if call in (softmax, placing, prefilling) else "lasp2"), mesh=mesh, **options
    )
    return place_lengths(cp, placed) if placed else cp


def softmax(
    cp: ContextParallel,
    *,
    tokens: int = LENGTH,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    **settings: Any,
) -> None:
    q = torch.ones(tokens // cp.size, 1, 4, 8, dtype=dtype, requires_grad=grad)
    cp.attention(q, q, q, **settings)


def linear(cp: ContextParallel, **settings: Any) -> None:
    q = torch.ones(LENGTH // cp.size, 1, 4, 8)
    cp.linear_attention(q, q, q, **settings)


def extension(cp: ContextParallel, **settings: Any) -> None:
    q = torch.ones(LENGTH // cp.size, 1, 4, 8)
    cp.extend_linear(q, q, q, **settings)


def convolution(cp: ContextParallel, *, width: int = 4, channels: int = 3, **settings: Any) -> None:
    short_convolution(cp, torch.ones(LENGTH // cp.size, 1, 3), torch.ones(channels, width), **settings)


def placing(cp: ContextParallel, *, cu_seqlens: torch.Tensor = DOCUMENTS) -> None:
    softmax(place_documents(cp, cu_seqlens), cu_seqlens=cu_seqlens)


def joining(cp: ContextParallel, *, tokens: int = 8, dtype: torch.dtype = torch.float32, dim: int = 0) -> None:
    cp.unshard(torch.ones(tokens, 8, dtype=dtype), dim)


def shifting(cp: ContextParallel, *, tokens: int = 8, **settings: int) -> None:
    shift(cp, torch.ones(tokens, 8), **settings)


def prefilling(cp: ContextParallel, *, tokens: int = 16, **settings: Any) -> None:
    session = Session(cp, mesh=cp.mesh, batch=1, capacity=32)
    q = torch.ones(tokens // cp.size, 1, 4, 8)
    with session.prefill(16):
        session.attend(0, q, q, q, **settings)


class Broken(torch.Tensor):
    """Bounds that cannot be read."""

    def dim(self) -> int:
        raise RuntimeError("of this rank alone")


CALLS: Mapping[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "causal": (softmax, {}, {"causal": False}),
    "window": (softmax, {"window": (8, 0)}, {"window": (4, 0)}),
    "scale": (softmax, {}, {"scale": 0.5}),
    "documents": (softmax, {"cu_seqlens": DOCUMENTS}, {"cu_seqlens": torch.tensor([0, 12, 32])}),
    "tree": (softmax, {"tree": Tree((8, 12, 12), (-1, 0, 0))}, {"tree": Tree((12, 8, 12), (-1, 0, 0))}),
    "shapes": (softmax, {}, {"tokens": 48}),
    "shapes, by dtype": (softmax, {}, {"dtype": torch.float64}),
    "causal, linear": (linear, {}, {"causal": False}),
    "scale, linear": (linear, {}, {"scale": 0.5}),
    "documents, linear": (linear, {"cu_seqlens": DOCUMENTS}, {"cu_seqlens": torch.tensor([0, 12, 32])}),
    "shapes, convolution": (convolution, {}, {"width": 3}),
    "shapes, sink": (softmax, {}, {"sink": torch.zeros(4)}),
    "shapes, joined": (joining, {}, {"tokens": 12}),
    "shapes, joined, by dtype": (joining, {}, {"dtype": torch.float64}),
    "dim": (joining, {}, {"dim": 1}),
    "dim, shifted": (shifting, {}, {"dim": 1}),
    "by": (shifting, {}, {"by": 2}),
    "scale, session": (prefilling, {}, {"scale": 0.5}),
    "window, session": (prefilling, {}, {"window": (4, 0)}),
    "gradients": (softmax, {}, {"grad": True}),
    "call": (linear, {}, {"instead": convolution}),
    "layout": (softmax, {"layout": "zigzag"}, {"layout": "contiguous"}),
    "layout, linear": (linear, {"layout": "zigzag"}, {"layout": "contiguous"}),
    "provider": (softmax, {"layout": "zigzag"}, {"layout": "zigzag", "provider": "all_gather"}),
    "placed documents": (softmax, {"placed": (8, 24)}, {"placed": (24, 8)}),
    "options": (softmax, {}, {"fp8": "comm"}),
}
SETUP = ("provider", "layout", "placed", "fp8")


@each_value
@pytest.mark.parametrize("other", [0, 2])
@pytest.mark.parametrize("when", [1, FIRST, EVERY])
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_with_other_settings_is_named(name: str, when: int, other: int) -> None:
    call, usual, different = CALLS[name]

    def rank(mesh: Mesh) -> str:
        settings = dict(different if mesh.index == other else usual)
        cp = made(call, mesh, **{option: settings.pop(option) for option in SETUP if option in settings})
        cp._calls.number = when - 1
        with pytest.raises(ValueError, match="ranks made different calls") as raised:
            settings.pop("instead", call)(cp, **settings)
        return str(raised.value)

    rest = {0: "ranks 1-3", 2: "ranks 0, 1, 3"}[other]
    for text in run_threads(rank, {"cp": 4}):
        assert f"{name.split(',')[0]} ({rest} and rank {other} disagree)" in text, text


BOUNDS = {"cu_seqlens": torch.tensor([4, 32])}
REFUSED: Mapping[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "bounds": (softmax, BOUNDS, "cu_seqlens must increase from 0 to the 32 tokens"),
    "bounds of no document": (softmax, {"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "must increase"),
    "bounds of floats": (softmax, {"cu_seqlens": torch.tensor([0.0, 32.0])}, "cu_seqlens must be int32 or int64"),
    "bounds of rows": (softmax, {"cu_seqlens": torch.tensor([[0, 32]])}, "cu_seqlens must be int32 or int64"),
    "bounds, linear": (linear, BOUNDS, "cu_seqlens must increase"),
    "bounds, convolution": (convolution, BOUNDS, "cu_seqlens must increase"),
    "bounds of no type": (softmax, {"cu_seqlens": [0, 32]}, "cu_seqlens must be a tensor"),
    "scale": (softmax, {"scale": float("nan")}, "scale=nan"),
    "scale, linear": (linear, {"scale": float("nan")}, "scale=nan"),
    "scale, extension": (extension, {"scale": float("nan")}, "scale=nan"),
    "window": (softmax, {"window": 3}, "window=3"),
    "width": (convolution, {"channels": 5}, "x, weight and bias must be"),
    "growth": (linear, {"log_decay": torch.ones(4)}, "log_decay must be at most 0"),
    "dim": (joining, {"dim": 2}, "Dimension out of range"),
    "dim, shifted": (shifting, {"dim": -3}, "Dimension out of range"),
    "tokens, session": (prefilling, {"tokens": 32}, "this step expects"),
    "scale, session": (prefilling, {"scale": float("nan")}, "scale=nan"),
    "kept": (extension, {"kept": torch.ones(3)}, "kept must be bool"),
    "kind": (linear, {"provider": "ring"}, "is for softmax attention"),
    "kind, convolution": (convolution, {"provider": "ring"}, "is for softmax attention"),
    "bounds, placed": (placing, BOUNDS, "cu_seqlens must increase"),
    "any error": (softmax, {"cu_seqlens": Broken()}, "of this rank alone"),
}


@pytest.mark.parametrize("wrong", [(0,), (2,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_reaches_all(name: str, wrong: tuple[int, ...]) -> None:
    """Before anything of the call is sent; the next call is made together again."""
    call, different, why = REFUSED[name]

    def rank(mesh: Mesh) -> str:
        settings = dict(different if mesh.index in wrong else {})
        cp = made(call, mesh, **{option: settings.pop(option) for option in SETUP if option in settings})
        with pytest.raises((ValueError, RuntimeError, IndexError)) as raised:
            call(cp, **settings)
        assert cp.mesh.ledger.bytes() == 0
        if "kind" not in name:
            call(cp)
        return str(raised.value)

    for index, text in enumerate(run_threads(rank, {"cp": 4}, patience=5)):
        assert why in text, text
        assert text.startswith(ranks_named(list(wrong))) == (index not in wrong), text


@pytest.mark.parametrize("last", [6, 8])
@pytest.mark.parametrize("name", ["causal", "scale", "causal, linear", "scale, linear"])
def test_a_rank_that_differs_later_is_named(name: str, last: int) -> None:
    """From the sixth call on, or in that one alone, which nobody compares."""
    call, usual, different = CALLS[name]

    def rank(mesh: Mesh) -> str:
        cp = made(call, mesh)
        with pytest.raises(ValueError, match="ranks made different calls") as raised:
            for number in range(1, EVERY):
                call(cp, **(different if mesh.index == 1 and 6 <= number <= last else usual))
        assert cp._calls.number == 8
        return str(raised.value)

    texts = run_threads(rank, {"cp": 4})
    assert all(f"{name.split(',')[0]} (ranks 0, 2, 3 and rank 1 disagree)" in text for text in texts), texts
    (setting,) = different
    assert f"{different[setting]}" in texts[1].partition("from call 6 on ")[2] and "from call" not in texts[0]


@pytest.mark.parametrize("call", [softmax, linear, convolution])
def test_calls_that_agree_are_compared_in_the_first_calls_and_rarely_after(call: Callable[..., None]) -> None:
    def rank(mesh: Mesh) -> list[int]:
        cp = made(call, mesh)
        sent = []
        for number in range(FIRST + 3):
            if number == FIRST + 2:
                cp._calls.number = EVERY - 1
            before = cp._calls.ledger.bytes()
            call(cp)
            sent.append(cp._calls.ledger.bytes() - before)
        return sent

    for sent in run_threads(rank, {"cp": 4}):
        assert all(0 < n <= 3 * 8 * 17 for n in (*sent[:FIRST], sent[-1])), sent
        assert sent[FIRST:-1] == [0, 0]


MADE: Mapping[str, tuple[dict[str, Any], str]] = {
    "a grid": ({"provider": "attention2d", "grid": (4, 1)}, "options (ranks 0, 1, 3 and rank 2 disagree)"),
    "a provider": ({"provider": "ring"}, "provider (ranks 0, 1, 3 and rank 2 disagree); options"),
    "a layout": (
        {"provider": "attention2d", "layout": "striped"},
        "layout (ranks 0, 1, 3 and rank 2 disagree); options",
    ),
    "an unknown provider": ({"provider": "rign"}, "rank 2: provider='rign': did you mean ring"),
    "an unknown kernel": ({"provider": "attention2d", "backend": "x"}, "rank 2: backend='x': choose"),
}


def test_ranks_make_the_same_object_or_none() -> None:
    """Before groups of some ranks are made, which would wait for others."""

    def rank() -> dict[str, str]:
        texts = {}
        for what, (different, _) in MADE.items():
            usual = {"provider": "attention2d", "grid": (2, 2)}
            with pytest.raises(ValueError) as raised:
                ContextParallel(group=dist.group.WORLD, **(different if dist.get_rank() == 2 else usual))
            texts[what] = str(raised.value)
        cp = ContextParallel("attention2d", group=dist.group.WORLD, grid=(2, 2))
        softmax(cp)
        with pytest.raises(ValueError) as raised:
            softmax(cp, causal=dist.get_rank() != 2)
        return texts | {"another call": str(raised.value)}

    of_ranks = run_ranks(rank, 4, init_process_group=True, timeout=60)
    said = {what: why for what, (_, why) in MADE.items()} | {
        "another call": "causal (ranks 0, 1, 3 and rank 2 disagree)"
    }
    for what, why in said.items():
        for index, texts in enumerate(of_ranks):
            expected = why.removeprefix("rank 2: ") if index == 2 else why
            assert expected in texts[what], texts[what]


def test_one_rank_has_nobody_to_ask() -> None:
    softmax(ContextParallel("ring"))
    assert Calls().is_compared()
