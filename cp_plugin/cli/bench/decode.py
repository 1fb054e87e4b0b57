"""Prefill and decode on real ranks: checked first, then timed in turn.

Decode has a floor: the messages of the tree alone, the same bytes between the same ranks without any computation.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import shapes
from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench import measure
from cp_plugin.cli.bench.cases import make_case
from cp_plugin.cli.bench.measure import Taken
from cp_plugin.cli.bench.run import WARM_UP
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.problem import Problem
from cp_plugin.inference import Session, slots_for, tree
from cp_plugin.testing import oracle, ranks
from cp_plugin.testing.verify import limits

STEPS = 16
"""Tokens decoded in one timed call."""
RING = "ring"
"""The provider whose prefill the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One provider, over all ranks."""

    setup: Setup | None = None
    """None only as returned by a rank, which cannot send functions."""
    errors: dict[str, float] = field(default_factory=dict)
    """``prefill`` and ``decode`` -> relative error (norm) of the output against float64 on one device."""
    allowed: float = 0.0
    prefill: Sequence[float] = ()
    decode: Sequence[float] = ()
    """Seconds of the slowest rank, round by round; empty: wrong, or it cannot run."""
    sent: Sequence[int] = ()
    """Bytes that each rank sends per token."""

    @property
    def name(self) -> str:
        assert self.setup is not None
        return self.setup.provider.name

    @property
    def wrong(self) -> bool:
        """Whether an error is above its limit."""
        return any(not error <= self.allowed for error in self.errors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """All providers at one length."""

    problem: Problem
    """``seq_length`` tokens are prefilled before the first decode step."""
    measured: Sequence[Measured]
    floor: Sequence[float]
    """Seconds of one token's messages on the slowest rank, round by round."""

    @property
    def formula(self) -> tuple[int, ...]:
        """Expected bytes that each rank sends per token."""
        p = self.problem
        return tuple(tree.bytes_sent(p.size, rank, 1, p.batch, p.heads, p.v_head_dim, p.wide) for rank in range(p.size))

    def counted(self, one: Measured) -> bool:
        """Whether the ledger agrees with the formula."""
        return tuple(one.sent) == self.formula

    def over_floor(self, one: Measured) -> float | None:
        """Seconds per token over those of its messages; None for a single rank, which sends none."""
        return statistics.median(one.decode) / statistics.median(self.floor) if self.floor and one.decode else None

    def over_ring(self, one: Measured) -> float | None:
        """Seconds of the prefill over those of ``RING``."""
        ring = next(m for m in self.measured if m.name == RING)
        return (
            statistics.median(one.prefill) / statistics.median(ring.prefill) if one.prefill and ring.prefill else None
        )

    @property
    def ok(self) -> bool:
        """Something was timed, nothing was wrong, and the bytes are the formula's."""
        timed = [one for one in self.measured if one.decode]
        return bool(timed) and not any(one.wrong for one in self.measured) and all(map(self.counted, timed))


def bench(
    setups: Sequence[Sequence[Setup]], device: str, rounds: int, timeout: float, here: torch.device | None = None
) -> list[DecodeResult]:
    """Run all setups at every length.

    Args:
        setups: of each length, for problems that differ in nothing else.
        here: this rank's device, if it has joined others; None: ranks are forked.

    Raises:
        RankError: if a forked rank fails.
    """

    def rank(mine: torch.device) -> list[DecodeResult]:
        return [run(of_length, mine, rounds) for of_length in setups]

    found = ranks.run(rank, setups[0][0].problem.size, device, timeout, here)
    return [
        replace(result, measured=[replace(m, setup=s) for m, s in zip(result.measured, of_length, strict=True)])
        for result, of_length in zip(found, setups, strict=True)
    ]


def run(setups: Sequence[Setup], device: torch.device, rounds: int) -> DecodeResult:
    """One length on this rank; collective, and the same on all ranks."""
    problem = setups[0].problem
    asked = measure.question(make_case("causal", problem), "softmax")
    measured = [_checked(setup, asked, device) if setup.reason is None else Measured() for setup in setups]
    right = [i for i, one in enumerate(measured) if one.errors and not one.wrong]
    if not right:
        return DecodeResult(problem=problem, measured=measured, floor=())
    warm_up = WARM_UP[device.type]
    layers = [_Layer(setups[i], device, STEPS * (rounds + warm_up)) for i in right]
    calls = [call for layer in layers for call in (layer.prefill, layer.decode)]
    calls += [_floor(problem, layers[0], device)] if problem.size > 1 else []
    measure.take_turns(calls, warm_up, device)
    by_rank = measure.everywhere((measure.take_turns(calls, rounds, device), [layer.sent for layer in layers]))
    taken = [Taken.of(of_ranks).total for of_ranks in zip(*(seconds for seconds, _ in by_rank), strict=True)]
    for number, i in enumerate(right):
        prefill, decode = taken[2 * number : 2 * number + 2]
        sent = [of_layers[number] for _, of_layers in by_rank]
        measured[i] = replace(measured[i], prefill=prefill, decode=_of_a_token(decode), sent=sent)
    floor = _of_a_token(taken[-1]) if problem.size > 1 else ()
    return DecodeResult(problem=problem, measured=measured, floor=floor)


def _of_a_token(seconds: Sequence[float]) -> list[float]:
    return [of_call / STEPS for of_call in seconds]


def _checked(setup: Setup, asked: oracle.Case, device: torch.device) -> Measured:
    """Errors of a short prompt, and of the rest of the sequence: one token, then the others at once."""
    n = asked.problem.seq_length
    prompt = n - 2 * setup.problem.size
    session = _session(setup, prompt, n, device)
    q, k, v = (x.to(device) for x in asked.inputs[:3])
    with session.prefill(prompt):
        out = session.attend(0, *(session.cp.shard(x[:prompt]) for x in (q, k, v)))
    session.close([prompt] * setup.problem.batch)
    decoded = []
    for part in (slice(prompt, prompt + 1), slice(prompt + 1, n)):
        with session.decode(part.stop - part.start):
            decoded.append(session.attend(0, q[part], k[part], v[part]))
    want = asked.want[0]
    errors = measure.errors((out, torch.cat(decoded)), (session.cp.shard(want[:prompt]), want[prompt:]))
    allowed = limits(setup, asked, device)["out"]
    return Measured(errors=dict(zip(("prefill", "decode"), errors, strict=True)), allowed=allowed)


class _Layer:
    """The timed calls of one provider on one rank; ``tokens``: that will be decoded."""

    sent = 0
    """Bytes of a token, by the ledger."""

    def __init__(self, setup: Setup, device: torch.device, tokens: int) -> None:
        problem, n = setup.problem, setup.problem.seq_length
        self._problem, self._device = problem, device
        self.session = _session(setup, n, n + tokens, device)
        self._mine, self._one = (_random(problem, count, device) for count in (n // problem.size, 1))
        with self.session.prefill(n):
            self.session.attend(0, *self._mine)
        self.session.close([n] * problem.batch)

    def prefill(self, between: Callable[[], object]) -> None:
        """Prefill the whole prompt in a fresh session."""
        kept, batch = self.session, self._problem.batch
        fresh = Session(kept.cp, batch=batch, capacity=kept.slots.capacity, mesh=kept.mesh, device=self._device)
        with fresh.prefill(self._problem.seq_length):
            fresh.attend(0, *self._mine)
        between()

    def decode(self, between: Callable[[], object]) -> None:
        """Decode ``STEPS`` tokens."""
        ledger = self.session.mesh.ledger
        before = ledger.bytes(phase="decode")
        for _ in range(STEPS):
            with self.session.decode(1):
                self.session.attend(0, *self._one)
        self.sent = (ledger.bytes(phase="decode") - before) // STEPS
        between()


def _floor(problem: Problem, layer: _Layer, device: torch.device) -> measure.Call:
    """The messages of ``STEPS`` tokens, with the same bytes and no computation."""
    shape = (1, problem.batch, problem.heads, problem.v_head_dim + 1)
    message = torch.zeros(shape, dtype=accumulation_dtype(problem.dtype), device=device)

    def floor(between: Callable[[], object]) -> None:
        for _ in range(STEPS):
            tree.along(layer.session.mesh, message, lambda lower, upper: lower)
        between()

    return floor


def _session(setup: Setup, prompt: int, tokens: int, device: torch.device) -> Session:
    cp = ContextParallel(setup, group=dist.group.WORLD)
    capacity = max(slots_for(tokens, cp.size), slots_for(prompt, cp.size, 2))
    group = dist.group.WORLD if cp.size > 1 else None
    return Session(cp, batch=setup.problem.batch, capacity=capacity, group=group, device=device)


def _random(problem: Problem, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    likes = shapes(problem, tokens)[:3]
    return tuple(torch.randn(x.shape, generator=generator).to(device, problem.dtype) for x in likes)
