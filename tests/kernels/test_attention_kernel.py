"""Attention kernels: positions, masks, head sizes, dtypes, running partials, strides, skipped blocks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from brute import LIMITS, Answer, Inputs, answer, errors, seen, sides, views
from cp_kernels import backward as backward_module
from cp_kernels import forward as forward_module
from cp_kernels import visible
from cp_kernels.backward import backward
from cp_kernels.forward import forward
from cp_kernels.sizes import Sizes
from cp_kernels.visible import LAST, Runs, View
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from nightly import NIGHT, each_value
from torch import Tensor

CAUSAL = View(right=0)
SIDES = sides()
VIEWS = views()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that short sequences have inner, edge and invisible ones."""
    for module, name in ((forward_module, "forward_sizes"), (backward_module, "dq_sizes")):
        monkeypatch.setattr(module, name, lambda *_: Sizes(32, 16, 4, 1))
    monkeypatch.setattr(backward_module, "dkv_sizes", lambda *_: Sizes(16, 32, 4, 1))
    visible._kept.clear()


def run(x: Inputs, rows: Runs, keys: Runs, view: View, scale: float, softcap: float | None = None) -> Answer:
    out, lse = forward(x.q, x.k, x.v, rows, keys, view, scale, softcap=softcap)
    delta = (x.dout.float() * out.float()).sum(-1)
    return Answer(out, lse, *backward(x.dout, x.q, x.k, x.v, lse, delta, rows, keys, view, scale, softcap))


def assert_right(got: Answer, want: Answer, limit: float) -> None:
    assert max((measured := errors(got, want)).values()) <= limit, measured


@each_value
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("sides", SIDES.values(), ids=SIDES)
def test_positions_and_masks(sides: tuple[Runs, Runs], view: View) -> None:
    x = Inputs.random(*sides)
    assert_right(run(x, *sides, view, 0.3), answer(x, *sides, view, 0.3), LIMITS[torch.float32])


@each_value
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24)], ids=str)
def test_head_sizes_and_dtypes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    sides = (range(1, 80, 2),), (range(40),)
    x = Inputs.random(*sides, sizes=sizes, dtype=dtype)
    got = run(x, *sides, CAUSAL, sizes[0] ** -0.5)
    assert got.out.dtype == got.dk.dtype == dtype and got.lse.dtype == torch.float32
    assert_right(got, answer(x, *sides, CAUSAL, sizes[0] ** -0.5), LIMITS[dtype])


@pytest.mark.parametrize("view", [CAUSAL, VIEWS["documents and window, both ways"]], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (40, 24)], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 5.0])
def test_capped_scores(softcap: float, sizes: tuple[int, int], view: View) -> None:
    sides = (range(1, 80, 2),), (range(60),)
    x = Inputs.random(*sides, sizes=sizes)
    for scale in (1.0, -0.3):
        got, want = (of(x, *sides, view, scale, softcap) for of in (run, answer))
        assert_right(got, want, LIMITS[torch.float32])


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_turn_scores_around(scale: float) -> None:
    sides = (range(80),), (range(80),)
    x = Inputs.random(*sides)
    assert_right(run(x, *sides, CAUSAL, scale), answer(x, *sides, CAUSAL, scale), LIMITS[torch.float32])
    out, lse = forward(30 * x.q, x.k, x.v, *sides, CAUSAL, scale)
    assert out.isfinite().all() and lse.isfinite().all(), "the running maximum is one"


@settings(max_examples=15 if NIGHT else 5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_runs_heads_and_batches_under_any_mask(data: st.DataObject) -> None:
    def runs() -> Runs:
        at, runs_ = 0, []
        for _ in range(data.draw(st.integers(1, 3))):
            at += data.draw(st.integers(0, 40))
            runs_.append(range(at, at + (step := data.draw(st.integers(1, 5))) * data.draw(st.integers(1, 25)), step))
            at = runs_[-1][-1] + 1
        return tuple(runs_)

    reach = st.none() | st.integers(0, 60)
    cuts = sorted(data.draw(st.sets(st.integers(1, 400), max_size=4)))
    view = View(data.draw(reach), data.draw(reach), (0, *cuts, 500) if cuts else ())
    rows, keys = runs(), runs()
    heads = data.draw(st.sampled_from([(6, 2), (3, 1), (4, 4), (4, 2)]))
    x = Inputs.random(rows, keys, heads=heads, batch=data.draw(st.integers(1, 2)))
    assert_right(run(x, rows, keys, view, 0.3), answer(x, rows, keys, view, 0.3), LIMITS[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_running_partials(dtype: torch.dtype) -> None:
    rows, first, second = (range(0, 150, 3),), (range(100, 140),), (range(0, 60, 2),)
    x, y = Inputs.random(rows, first, dtype=dtype), Inputs.random(rows, second, dtype=dtype)
    out, lse = forward(x.q, x.k, x.v, rows, first, CAUSAL, 0.3)
    running = out.float(), lse
    blind = (lse == -torch.inf).all(-1).squeeze(1)
    assert blind.any() and not blind.all()
    merged = forward(x.q, y.k, y.v, rows, second, CAUSAL, 0.3, running)
    assert merged[0] is running[0] and merged[1] is running[1]
    both = Inputs(x.q, torch.cat([x.k, y.k]), torch.cat([x.v, y.v]), x.dout)
    want = answer(both, rows, first + second, CAUSAL, 0.3)
    assert (merged[0].double() - want.out).norm() <= LIMITS[dtype] * want.out.norm()
    torch.testing.assert_close(merged[1].double(), want.lse, rtol=1e-5, atol=1e-5)


def test_blind_rows_keep_the_running_partial() -> None:
    rows, keys = (range(64),), (range(40, 60),)
    x = Inputs.random(rows, keys)
    out, lse = torch.randn(64, 1, 2, 16), torch.randn(64, 1, 2)
    before = out.clone(), lse.clone()
    forward(x.q, x.k, x.v, rows, keys, CAUSAL, 0.3, (out, lse))
    assert torch.equal(out[:32], before[0][:32]) and torch.equal(lse[:32], before[1][:32])  # a block that sees nothing
    torch.testing.assert_close(out[32:40], before[0][32:40])  # rows beside some that do
    assert not torch.isclose(lse[60:], before[1][60:]).any()


def test_tables_of_a_new_pack_are_made_once_for_all_ranks() -> None:
    """A ring of 64 ranks finds each token's document once, has its blocks, and counts the bytes of new tables only."""
    tokens, ranks = 1 << 14, 64
    for kept in (visible._ends, visible._blocks):
        kept.cache_clear()
    with patch.object(visible, "_nbytes", wraps=visible._nbytes) as counted:
        for pack in (1, 2):
            view = View(0, None, (0, 100 * pack, 5000, tokens))
            for rank in (*range(ranks), *range(ranks)):
                visible.side((range(rank, tokens, ranks),), view, 32, torch.device("cpu"))
            assert visible._ends.cache_info().misses == pack and counted.call_count == pack * ranks
    assert visible._blocks.cache_info().misses == ranks


def test_invisible_blocks_are_never_loaded() -> None:
    """They hold NaN, which would spoil results even when multiplied by 0."""
    rows, keys, view = (range(100, 164),), (range(0, 160, 2), range(200, 264)), View(left=31, right=0)
    x = Inputs.random(rows, keys)
    want = answer(x, rows, keys, view, 0.3)
    visible = seen(rows, keys, view).any(0).nonzero().flatten()
    hidden = torch.ones(x.k.size(0), dtype=torch.bool)
    hidden[visible[0] // 32 * 32 : visible[-1] + 1] = False  # the backward pass has blocks of 32 keys
    k, v = x.k.clone(), x.v.clone()
    k[hidden] = v[hidden] = torch.nan
    assert hidden.sum() > 90
    out, lse = forward(x.q, k, v, rows, keys, view, 0.3)
    torch.testing.assert_close(out.double(), want.out, rtol=1e-5, atol=1e-5)
    delta = (x.dout * out).sum(-1)
    dq, dk, dv = backward(x.dout, x.q, k, v, lse, delta, rows, keys, view, 0.3)
    torch.testing.assert_close(dq.double(), want.dq, rtol=1e-5, atol=1e-5)
    assert dk[hidden].eq(0).all() and dv[hidden].eq(0).all()


def test_strided_views_give_the_same_bits() -> None:
    sides = SIDES["gathered"]
    x = Inputs.random(*sides, heads=(2, 1), batch=2)
    strided = Inputs(*(y.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for y in x))
    assert not strided.q.is_contiguous()
    for a, b in zip(run(x, *sides, CAUSAL, 0.3), run(strided, *sides, CAUSAL, 0.3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_offsets_beyond_int32(name: str) -> None:
    """Rows 2^30 elements apart, in reserved memory that is hardly touched."""
    sides = (range(5),), (range(5),)
    x = Inputs.random(*sides, heads=(1, 1))
    far = torch.empty(4 * 2**30 + 16, dtype=torch.float32).as_strided((5, 1, 1, 16), (2**30, 16, 16, 1))
    far.copy_(getattr(x, name))
    for a, b in zip(run(x, *sides, CAUSAL, 0.3), run(x._replace(**{name: far}), *sides, CAUSAL, 0.3), strict=True):
        assert torch.equal(a, b)


def test_positions_up_to_the_limit_of_int32() -> None:
    rows, keys = (range(LAST - 41, LAST - 1, 2),), (range(0, 10), range(LAST - 40, LAST - 1, 3))
    x = Inputs.random(rows, keys)
    for view in (CAUSAL, View(left=12, right=5), View()):
        assert_right(run(x, rows, keys, view, 0.3), answer(x, rows, keys, view, 0.3), LIMITS[torch.float32])
    with pytest.raises(ValueError, match=r"position 2147483647 is too large"):
        forward(x.q, x.k, x.v, (range(LAST - 19, LAST + 1),), keys, CAUSAL, 0.3)


def test_running_sums_of_any_strides() -> None:
    """As libraries store them: heads or batch first."""
    sides = (range(5),), (range(5),)
    x = Inputs.random(*sides)
    out, lse = forward(x.q, x.k, x.v, *sides, CAUSAL, 0.3)
    other = out.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3), lse.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    want = forward(x.q, x.k, x.v, *sides, View(), 0.3, (out, lse))
    got = forward(x.q, x.k, x.v, *sides, View(), 0.3, other)
    assert not other[1].is_contiguous() and all(map(torch.equal, got, want))


def test_what_does_not_fit_is_refused() -> None:
    sides = (range(5),), (range(5),)
    x, many = Inputs.random(*sides), torch.empty(1, 2**15, 2, 1)
    out, lse = forward(x.q, x.k, x.v, *sides, CAUSAL, 0.3)

    def call(rows: int = 5, onto: tuple[Tensor, Tensor] | None = None, **tensors: Tensor) -> None:
        q, k, v, _ = x._replace(**tensors)
        forward(q, k, v, (range(rows),), sides[1], CAUSAL, 0.3, onto)

    for change, words in (
        ({"k": x.k.double()}, r"share one dtype.*float64"),
        ({"q": x.q.double(), "k": x.k.double(), "v": x.v.double()}, r"bfloat16, float16 and float32.*float64"),
        ({"q": x.q.mT.contiguous().mT}, r"last dimension of q.*stride"),
        ({"v": x.v[:-1]}, r"5 keys.*4 values|do not fit"),
        ({"k": x.k.repeat(1, 1, 3, 1), "v": x.v.repeat(1, 1, 3, 1)}, "multiple"),
        ({"rows": 6}, "6 positions for 5 queries"),
        ({"onto": (out.bfloat16(), lse)}, r"running out .*got torch.bfloat16"),
        ({"onto": (out[:-1], lse)}, "running out must be"),
        ({"onto": (out, lse[:1].expand(lse.shape))}, r"rows of lse .* share memory"),
        ({"onto": (out.mT.contiguous().mT, lse)}, "dense last dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**change)
    with pytest.raises(ValueError, match=r"65535 heads .* not 32768 x 2"):
        forward(many, many, many, (range(1),), (range(1),), CAUSAL, 0.3)
