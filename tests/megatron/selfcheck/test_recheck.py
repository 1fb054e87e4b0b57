"""``--cp-check-every``: correct training runs pass with a margin; what is compared, and what it costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from case import Case, cases
from feature_faults import STRIPED
from nightly import one_case
from torch import Tensor
from torch.nn.functional import normalize
from training import SGD, train

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.linear import recurrence
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.selfcheck.exact_rows import Exact, Rounding, Softmax, compare

pytestmark = pytest.mark.usefixtures("adapter")

CHECKED = [case for case in cases() if {"check", "start"} & {*case.where}]
STEPS = 6


def _told() -> None:
    """Print each comparison: name, place, error and bound, or of identities the step; 0: the start-up check's."""
    from cp_plugin.megatron.selfcheck import identities, recheck

    judge = recheck.Rows._judge

    def judged(self: Any, name: str, got: Tensor, want: Exact) -> None:
        verdict = compare(got, want, self.rounding)
        print(f"\nCOMPARED {name} {self.place.step} {self.place.layer} {self.head} {verdict.error} {verdict.allowed}")
        judge(self, name, got, want)

    recheck.Rows._judge, sums = judged, identities.Identities._judge

    def judged_sums(self: Any) -> None:
        print(f"\nIDENTITIES {self.place.step}")
        sums(self)

    identities.Identities._judge = judged_sums


def _compared(text: str) -> list[list[str]]:
    return [line.split()[1:] for line in text.splitlines() if line.startswith("COMPARED")]


@one_case
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CHECKED])
def test_correct_training_passes(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case.start("--cp-check-every 1", steps=STEPS, prepare=_told)
    text = capfd.readouterr().out
    compared = "--cp-check-every does not compare" not in text
    assert compared or "--use-torch-fsdp2" in case.flags, text
    lines = _compared(text)
    identities = re.findall(r"^IDENTITIES (\d+)", text, re.MULTILINE)
    assert {int(step) for _, step, *_ in lines} == set(map(int, identities)) == set(range(STEPS + 1))
    assert {name for name, *_ in lines} == {"out", "dq"}
    assert max(float(error) / float(allowed) for *_, error, allowed in lines) < 0.5, "a limit without room"


def test_draws_layers_and_heads_in_checked_steps_only(capfd: pytest.CaptureFixture[str]) -> None:
    assert Settings().identities_every == 100, "without the flag"
    more = "--eval-iters 1 --eval-interval 2"
    training = SGD.replace("--eval-iters 0 --eval-interval 1000", more)
    train(2, f"{STRIPED} --cp-check-every 2", steps=12, training=training, prepare=_told)
    lines = [line for line in _compared(capfd.readouterr().out) if line[1] != "0"]
    assert sorted({int(step) for _, step, *_ in lines}) == [2, 4, 6, 8, 10, 12]
    assert len(lines) == 6 * 2, "out and dq of one call in each step, by the first rank; none of an evaluation"
    assert {layer for _, _, layer, *_ in lines} == {"1", "2"}
    assert len({head for _, _, _, head, *_ in lines}) > 1


def test_bytes_of_the_check() -> None:
    one, *_ = train(2, f"{STRIPED} --bf16 --cp-check-every 1", steps=1)
    keys = 2 * 32 * (16 + 16) * 2  # for out and dq: k and v of 32 tokens, a head of 16, in bfloat16
    verdicts = 2 * (2 + 8) * 8
    assert one.sent["check", "all"] == keys + verdicts
    identities = 4 * 4 * 2 * 8  # of q, k, v and out, four sums per key/value head, in float64
    slices = (5 * 3 + 5) * 8  # of four entries and the loss: digests of batch, slice, received, and whether it was
    rotation = 4 * 8
    assert one.sent["check", "cp"] == identities + slices + rotation


FUTURE = torch.ones(40, 40, dtype=torch.bool).triu(1)


def _case(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = {"q": (40, 16), "k": (40, 16), "v": (40, 24), "dout": (40, 24)}
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("sink", [None, torch.tensor(0.5)])
@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_exact_rows_match_autograd(
    sink: Tensor | None, chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron.selfcheck import exact_rows

    monkeypatch.setattr(exact_rows, "_CHUNK", chunk)
    x = _case(torch.float64)
    q, hidden = x["q"].requires_grad_(), FUTURE
    scores = 0.3 * q @ x["k"].T
    scores = (scores if softcap is None else softcap * (scores / softcap).tanh()).masked_fill(hidden, -torch.inf)
    beside = scores.new_empty(40, 0) if sink is None else sink.double().expand(40, 1)
    out = torch.cat((scores, beside), 1).softmax(1)[:, :40] @ x["v"]
    (dq,) = torch.autograd.grad(out, q, x["dout"])
    rounding = Rounding.from_dtype(torch.float64, cuda=False)
    rows = torch.tensor([0, 3, 39])
    some = Softmax(q[rows].detach(), x["k"], x["v"], hidden[rows], Scores(0.3, softcap), sink=sink, rounding=rounding)
    torch.testing.assert_close(some.output().rows, out[rows].detach())
    torch.testing.assert_close(some.dq(x["dout"][rows]).rows, dq[rows])


@pytest.mark.parametrize("slab", [1 << 13, 16])
@pytest.mark.parametrize("left_out", ["", "beta", "starts", "log_decay"])
def test_exact_linear_rows_match_the_recurrence(left_out: str, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron.selfcheck import exact_rows

    monkeypatch.setattr(exact_rows, "_SLAB", slab)
    draw = torch.Generator().manual_seed(5)
    q, k = (torch.randn(100, 1, 1, 8, generator=draw, dtype=torch.float64) for _ in "qk")
    v, decay, beta = (torch.rand(100, 1, 1, n, generator=draw, dtype=torch.float64) for n in (5, 1, 1))
    x = Tokens(q, normalize(k, dim=3), v, -decay / 10, beta[..., 0], (torch.arange(100) % 30 == 0)[:, None])
    x = x._replace(**{left_out: None} if left_out else {})
    leaf, dout, at = q.clone().requires_grad_(), torch.randn(4, 5, generator=draw, dtype=torch.float64), [3, 99, 50, 51]
    out = recurrence.run(x._replace(q=leaf))[0][at, 0, 0]
    (dq,) = torch.autograd.grad(out, leaf, dout)
    rows = exact_rows.Linear(x, q[at, 0, 0], at, scale=1.0, rounding=Rounding.from_dtype(torch.float64, cuda=False))
    torch.testing.assert_close(rows.output().rows, out.detach())
    torch.testing.assert_close(rows.dq(dout).rows, dq[at, 0, 0])


def _rounded(x: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and dq of a kernel that rounds the operands of its matrix products."""
    q, k, v, dout = (x[name].float() for name in ("q", "k", "v", "dout"))
    scores = (0.25 * q @ k.T).masked_fill(FUTURE, -torch.inf)
    p = scores.softmax(1)
    out = (p.to(dtype).float() @ v).to(dtype)
    ds = p * (dout @ v.T - (dout * out.float()).sum(1, keepdim=True))
    return out, (0.25 * ds.to(dtype).float() @ k).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_allowed_and_one_wrong_element_is_not(dtype: torch.dtype) -> None:
    x = _case(dtype)
    out, dq = _rounded(x, dtype)
    rounding = Rounding.from_dtype(dtype, cuda=False)
    some = Softmax(x["q"], x["k"], x["v"], FUTURE, Scores(0.25), sink=None, rounding=rounding)
    for got, want in ((out, some.output()), (dq, some.dq(x["dout"]))):
        assert not compare(got, want, rounding).wrong.any()
        for value in (got[21, 5] + 3 * want.bound[21, 5].to(dtype), torch.nan):
            wrong = got.clone()
            wrong[21, 5] = value
            assert compare(wrong, want, rounding).wrong.nonzero().tolist() == [[21]]


def test_nonfinite_references_are_ignored() -> None:
    got, want = torch.full((2, 3), torch.nan), Exact(torch.full((2, 3), torch.inf).double(), torch.ones(2, 3).double())
    assert not compare(got, want, Rounding.from_dtype(torch.float32, cuda=False)).wrong.any()
