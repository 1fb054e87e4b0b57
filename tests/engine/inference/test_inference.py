"""Inference as a library: slots, the tree, stores, misuse. Numbers of whole sessions: ``test_verify_decode`` of
every provider and in FP8, ``tests/megatron/mixers/test_decoding.py`` of every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import attend_to_slots, relative_error
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.comm import Mesh, ThreadMesh, run_threads
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.layout import LAYOUTS
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.inference import CacheFullError, Session, Slots, slots_for, store, tree
from cp_plugin.engine.inference.slots import NOWHERE
from cp_plugin.engine.inference.store import Cache, Latent
from cp_plugin.engine.placement.documents import get_layout

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Slots


@st.composite
def books(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 6))
    layout = get_layout(draw(st.sampled_from(sorted(LAYOUTS))))
    chunks = [layout.divisor(size) * n for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    lengths = draw(st.lists(st.integers(1, sum(chunks)), min_size=1, max_size=3))
    return {"size": size, "layout": layout, "chunks": chunks, "lengths": lengths, "steps": draw(STEPS)}


STEPS = st.lists(st.integers(1, 7), max_size=5)


def filled(
    size: int, layout: Any, chunks: list[int], lengths: list[int], steps: list[int], spare: int = 0
) -> list[Slots]:
    """All ranks' slots after these steps."""
    capacity = slots_for(sum(chunks) + sum(steps) + spare, size)
    ranks = [Slots(size, index, len(lengths), capacity, CPU) for index in range(size)]
    for one in ranks:
        for tokens in chunks:
            one.chunk(tokens, lambda rank, tokens=tokens: layout.segments(tokens, size, rank))
        one.close(lengths)
        for tokens in steps:
            one.deal(tokens)
    return ranks


@settings(max_examples=60)
@given(books())
def test_every_position_is_held_once_and_the_deal_is_even(case: dict[str, Any]) -> None:
    ranks = filled(**case)
    total = sum(case["steps"])
    for i, length in enumerate(case["lengths"]):
        held = torch.cat([one.positions[:, i] for one in ranks])
        assert held[held != NOWHERE].sort().values.tolist() == list(range(length + total))
        assert all(one.lengths[i] == length + total and one.held == ranks[0].held for one in ranks)
        for one in ranks:
            own = one.positions[: one.held[i][one.index], i]
            assert (own != NOWHERE).all() and (own.diff() > 0).all(), "slots are filled from the first one on"
            assert (one.positions[one.used :, i] == NOWHERE).all()
        spread = max(ranks[0].held[i]) - min(ranks[0].held[i])
        if case["layout"].cyclic or length == sum(case["chunks"]):
            assert spread <= 1
        before = filled(**{**case, "steps": []})[0].held[i]
        assert spread <= max(1, max(before) - min(before)), "decode evens out what prompts left uneven"


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 50))
def test_a_full_cache_says_what_would_be_enough(size: int, capacity: int, beyond: int) -> None:
    slots = Slots(size, 0, 1, capacity, CPU)
    slots.require(size * capacity)
    tokens = size * capacity + beyond
    with pytest.raises(CacheFullError) as error:
        slots.require(tokens)
    text = str(error.value)
    ranks, each = int(text.split("it needs ")[1].split()[0]), int(text.split("ranks, or ")[1].split()[0])
    assert f"{tokens} tokens" in text and f"{size} context-parallel ranks with {capacity} slots each" in text
    Slots(ranks, 0, 1, capacity, CPU).require(tokens)
    Slots(size, 0, 1, each, CPU).require(tokens)
    for fewer in ((ranks - 1, capacity), (size, each - 1)):
        if min(fewer) > 0:
            with pytest.raises(CacheFullError):
                Slots(fewer[0], 0, 1, fewer[1], CPU).require(tokens)


def test_bad_lengths_and_sizes_are_refused() -> None:
    slots = Slots(2, 0, 2, 4, CPU)
    slots.chunk(6, lambda rank: get_layout("striped").segments(6, 2, rank))
    for lengths in ([6], [0, 6], [6, 7], [6, 6, 6]):
        with pytest.raises(ValueError, match="2 prompts of 1 to 6 tokens"):
            slots.close(lengths)
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="a cache needs 1 or more ranks, sequences and slots"):
            Slots(sizes[0], 0, *sizes[1:], CPU)


# The tree


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_tree_merges_all_ranks(size: int, dtype: torch.dtype) -> None:
    t, b, h, d, e = 2, 3, 4, 8, 6
    q, k, v = (normal(n, b, h, x, seed=n + x, dtype=dtype) for n, x in ((t, d), (5 * size, d), (5 * size + 1, e)))
    scores = torch.einsum("qbhd,kbhd->qbhk", q, k)
    seen = torch.arange(5 * size) // 5 != size - 1  # the last rank has nothing for the first query
    scores[0] = scores[0].masked_fill(~seen | (size == 1), -torch.inf)

    def rank(mesh: Mesh) -> tuple[Partial, int]:
        own = slice(5 * mesh.index, 5 * mesh.index + 5)
        lse = scores[..., own].logsumexp(3)
        weights = (scores[..., own] - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(3)).exp()
        out = torch.einsum("qbhk,kbhe->qbhe", weights, v[own])
        return tree.merged(mesh, Partial(out, lse)), mesh.ledger.bytes()

    ranks = run_threads(rank, {"cp": size})
    want_lse = scores.logsumexp(3)
    want = torch.einsum("qbhk,kbhe->qbhe", scores.softmax(3).nan_to_num(), v[: 5 * size])
    limit = 1e-6 if dtype == torch.float32 else 1e-14
    for index, (partial, sent) in enumerate(ranks):
        assert torch.equal(partial.out, ranks[0][0].out) and torch.equal(partial.lse, ranks[0][0].lse)
        assert relative_error(partial.out, want) < limit
        torch.testing.assert_close(partial.lse, want_lse, rtol=10 * limit, atol=10 * limit)
        assert sent == tree.bytes_sent(size, index, t, b, h, e, dtype.itemsize)
    most = max(tree.messages(size, index) for index in range(size))
    assert most <= size.bit_length(), "as many messages as the tree is high, and one to a rank beyond"


# Stores


def test_a_packed_cache_has_a_byte_for_each_element_and_one_for_each_row() -> None:
    k, v = normal(12, 2, 2, 16, dtype=torch.bfloat16), normal(12, 2, 2, 8, dtype=torch.bfloat16)
    assert Cache(12, 8, k, v, fp8=True).nbytes == 12 * 2 * 2 * (16 + 8 + 2)
    with pytest.raises(ValueError, match=r"an FP8 cache holds .* got torch.float64"):
        Cache(12, 8, k.double(), v.double(), fp8=True)


def latents(tokens: int, heads: int = 4, rank: int = 12, plain: int = 8, rotated: int = 4, e: int = 6) -> Any:
    """A ``Latent`` of two sequences, and the keys and values that it stands for."""
    latent = Latent(normal(tokens, 2, 1, rank + rotated), normal(heads, plain, rank), normal(heads, e, rank, seed=1))
    compressed, turned = latent.rows.split((rank, rotated), 3)
    k = torch.cat((torch.einsum("sbxr,hdr->sbhd", compressed, latent.up_k), turned.expand(-1, -1, heads, -1)), 3)
    return latent, k, torch.einsum("sbxr,her->sbhe", compressed, latent.up_v)


def test_latents_attend_as_the_heads_that_are_made_of_them() -> None:
    latent, k, v = latents(9)
    q, positions = normal(3, 2, 4, 12, seed=5), torch.tensor([[6], [7], [8]], dtype=torch.int32).expand(3, 2)
    held = torch.arange(9, dtype=torch.int32).unsqueeze(1).expand(9, 2)
    of_heads, of_latents = Cache(9, 6, k, v), Cache(9, 12, latent.rows)
    for cache, kept in ((of_heads, (k, v)), (of_latents, (latent.rows,))):
        cache.put(slice(7), *(x[:7] for x in kept))
        slots, sequences = torch.tensor([7, 7, 8, 8]), torch.tensor([0, 1, 0, 1])
        cache.put((slots, sequences), *(x[slots, sequences] for x in kept))
    for got, want in zip(latent.heads(of_latents.get(0, 9)[0]), (k, v), strict=True):
        torch.testing.assert_close(got, want)
    by_heads, _ = store.attend(q, of_heads, held, positions, Scores(12**-0.5))
    by_latents, _ = store.attend(latent.queries(q), of_latents, held, positions, Scores(12**-0.5))
    want = attend_to_slots(q, k, v, held, positions, 12**-0.5)[0]
    assert [relative_error(out, want) < 1e-6 for out in (by_heads, latent.outputs(by_latents))] == [True, True]
    assert of_latents.nbytes * 4 * (12 + 6) == of_heads.nbytes * 16


# One rank's part


@pytest.mark.parametrize("elements", [1, 2**9, store.ELEMENTS], ids=["one key", "blocks", "whole"])
@pytest.mark.parametrize("window", [None, (3, 0), (0, 0), (-1, -1)], ids=str)
def test_a_rank_attends_to_its_slots(elements: int, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ELEMENTS", elements)
    q, k, v = normal(2, 2, 4, 8), normal(12, 2, 2, 8, seed=1), normal(12, 2, 2, 6, seed=2)
    cache = Cache(12, 6, k, v)
    cache.put(slice(len(k)), k, v)
    held = torch.tensor([[0, 4], [3, 5], [4, 6], [5, 7], *[[NOWHERE, 8 + i] for i in range(8)]], dtype=torch.int32)
    positions = torch.tensor([[5, 3], [6, 14]], dtype=torch.int32)
    out, lse = store.attend(q, cache, held, positions, Scores(8**-0.5), window)
    want, want_lse = attend_to_slots(q, k, v, held, positions, 8**-0.5, -1 if window is None else window[0])
    torch.testing.assert_close((out.double(), lse.double()), (want, want_lse), rtol=1e-5, atol=1e-6)
    assert not out[0, 1].any(), "a query before all keys"


def test_a_rank_without_slots_adds_nothing() -> None:
    cache = Cache(1, 6, normal(1, 1, 2, 8), normal(1, 1, 2, 6))
    none = torch.empty(0, 1, dtype=torch.int32)
    out, lse = store.attend(normal(1, 1, 4, 8), cache, none, torch.zeros(1, 1, dtype=torch.int32), Scores(1.0))
    assert out.shape == (1, 1, 4, 6) and not out.any() and (lse == -torch.inf).all()


# Sessions


def session(mesh: Mesh | None = None, provider: str = "ring", **named: Any) -> Session:
    named = {"batch": 2, "capacity": 8, **named}
    if mesh is None:
        return Session(ContextParallel(provider), **named)
    cp = ContextParallel(provider, mesh=mesh)
    assert isinstance(mesh, ThreadMesh)
    return Session(cp, mesh=mesh.duplicate({"cp": cp.size}), **named)


def rows(tokens: int, batch: int = 2, heads: int = 2, size: int = 8) -> Tensor:
    return normal(tokens, batch, heads, size)


SCORES = {"window": {"window": (3, 0)}, "sink": {"sink": torch.arange(2.0)}, "cap": {"softcap": 0.5, "scale": 0.3}}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_a_session_attends_as_one_call_does(scores: dict[str, Any]) -> None:
    """To a prompt in two chunks, then token by token."""
    x = [normal(11, 2, 2, 8, seed=seed, dtype=torch.float64) for seed in range(3)]

    def rank(mesh: Mesh) -> Tensor:
        one, outs = session(mesh), []
        for part in (slice(0, 4), slice(4, 8)):
            with one.prefill(4):
                outs.append(one.cp.unshard(one.attend(0, *(one.cp.shard(y[part]) for y in x), **scores)))
        one.close([8, 8])
        for token in range(8, 11):
            with one.decode():
                outs.append(one.attend(0, *(y[token : token + 1] for y in x), **scores))
        return torch.cat(outs)

    want = ContextParallel("ring", layout="contiguous").attention(*x, **scores)
    for got in run_threads(rank, {"cp": 2}):
        torch.testing.assert_close(got, want)


def test_misuse_is_refused() -> None:
    one = session()
    with pytest.raises(ValueError, match="for use inside"):
        one.attend(0, rows(1), rows(1), rows(1))
    with pytest.raises(ValueError, match="the prompt is not complete"), one.decode():
        pass
    with one.prefill(4):
        for q, k, text in (
            (rows(3), rows(3), "4 tokens of 2 sequences"),
            (rows(4, batch=1), rows(4, batch=1), "4 tokens of 2 sequences"),
            (rows(4), rows(3), "do not match"),
            (rows(4), rows(4, heads=3), "do not match"),
            (rows(4), rows(4)[0], "needs .tokens, batch, heads, head size."),
        ):
            with pytest.raises(ValueError, match=text):
                one.attend(0, q, k, k if q.shape == k.shape else rows(4))
        one.attend(0, *(rows(4),) * 3)
    with pytest.raises(ValueError, match="for use inside"):
        one.attend(0, *(rows(4),) * 3)
    with pytest.raises(CacheFullError, match="a context of 12 tokens"), one.prefill(8):
        pass
    one.close([4, 2])
    with pytest.raises(ValueError, match="the prompt is complete"), one.prefill(4):
        pass
    with one.decode(2), pytest.raises(ValueError, match="2 tokens of 2 sequences"):
        one.attend(0, *(rows(1),) * 3)
    held = [list(ranks) for ranks in one.slots.held]
    with pytest.raises(CacheFullError, match="needs 2 ranks, or 9 slots"), one.decode(3):
        pass
    assert one.slots.held == held and one.lengths == [6, 4] and one.nbytes == 2 * 8 * 2 * 2 * 8 * 4


def test_linear_attention_and_other_meshes_are_refused() -> None:
    linear = session(provider="lasp2")
    with linear.prefill(4), pytest.raises(ValueError, match=r"use ContextParallel\.extend_linear"):
        linear.attend(0, *(rows(4),) * 3)

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("ring", mesh=mesh)
        with pytest.raises(ValueError, match="decode needs the one axis cp of 2 ranks"):
            Session(cp, batch=1, capacity=1, mesh=mesh.duplicate({"other": 2}))
        with pytest.raises(ValueError, match="needs as many"):
            mesh.duplicate({"cp": 4})

    run_threads(rank, {"cp": 2})


def test_meshes_beside_each_other_do_not_mix_their_messages() -> None:
    def rank(mesh: Mesh) -> list[float]:
        other, third = mesh.duplicate({"cp": 2}), mesh.duplicate({"cp": 2})
        peer = 1 - mesh.index
        pending = [
            m.exchange("cp", (torch.tensor([10.0 * i + mesh.index]),), to=peer, source=peer)
            for i, m in enumerate((mesh, third, other))
        ]
        assert mesh.ledger.bytes() == 12
        return [one.wait()[0].item() for one in reversed(pending)][::-1]

    assert run_threads(rank, {"cp": 2}) == [[1, 11, 21], [0, 10, 20]]
