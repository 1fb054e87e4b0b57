"""Prefill and decode on real ranks: right first, then timed in turn; and beside decode its floor.

The floor is the tree's messages alone: the same bytes between the same ranks, and nothing is computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import shapes
from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench import gate, timing
from cp_plugin.cli.bench.masks import Case
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.problem import Problem
from cp_plugin.inference import Session, slots_for, tree
from cp_plugin.testing import oracle
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.ranks import join
from cp_plugin.testing.verify import limits

STEPS = 16
"""Tokens that are decoded in one timed call."""


class Calls(NamedTuple):
    """What can be timed on one rank."""

    prefill: Callable[[], object]
    decode: Callable[[], object]


@dataclass(slots=True, kw_only=True)
class Reading:
    """What one rank saw of one provider."""

    squares: dict[str, gate.Squares]
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    """Seconds of a token, round by round."""
    sent: int = 0
    """Bytes of a token, by the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One provider, over all ranks."""

    setup: Setup | None = None
    """None only between ranks: a rank sends no functions back."""
    errors: dict[str, float] = field(default_factory=dict)
    """Of ``prefill`` and ``decode``: relative error (norm) of the output against float64 on one device."""
    allowed: float = 0.0
    prefill: Sequence[float] = ()
    decode: Sequence[float] = ()
    """Seconds of the slowest rank, round by round; empty: it was wrong, or cannot do it."""
    sent: Sequence[int] = ()
    """Of every rank: bytes of a token."""

    @property
    def wrong(self) -> bool:
        """Whether it computes something else."""
        return any(not error <= self.allowed for error in self.errors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """One length."""

    problem: Problem
    """``seq_length`` tokens are taken in before the first is decoded."""
    measured: Sequence[Measured]
    floor: Sequence[float]
    """Seconds of a token's messages, of the slowest rank, round by round."""

    @property
    def formula(self) -> tuple[int, ...]:
        """Bytes that every rank is to send for a token."""
        p = self.problem
        return tuple(tree.bytes_sent(p.size, rank, 1, p.batch, p.heads, p.v_head_dim, p.wide) for rank in range(p.size))

    def counted(self, one: Measured) -> bool:
        """Whether the ledger has what the formula says."""
        return tuple(one.sent) == self.formula

    def over_floor(self, one: Measured) -> float | None:
        """Seconds of a token over those of its messages; None for one rank, which sends none."""
        return statistics.median(one.decode) / statistics.median(self.floor) if self.floor and one.decode else None

    @property
    def ok(self) -> bool:
        """Something was timed, nothing was wrong, and bytes are those of the formula."""
        timed = [one for one in self.measured if one.decode]
        return bool(timed) and not any(one.wrong for one in self.measured) and all(map(self.counted, timed))


def bench(
    setups: Sequence[Sequence[Setup]], device: str, rounds: int, timeout: float, here: torch.device | None = None
) -> list[DecodeResult]:
    """Run all setups of every length.

    Args:
        setups: of each length, for problems that differ in nothing else.
        here: this rank's device, where it has joined others; None: ranks are forked.

    Raises:
        RankError: if a forked rank fails.
    """

    def rank() -> list[DecodeResult]:
        return [run(of_length, here or join_once(device), rounds) for of_length in setups]

    def join_once(name: str) -> torch.device:
        return torch.device("cpu") if dist.is_initialized() else join(name)

    size = setups[0][0].problem.size
    found = rank() if here is not None else run_ranks(rank, size, timeout=timeout)[0]
    return [
        replace(result, measured=[replace(m, setup=s) for m, s in zip(result.measured, of_length, strict=True)])
        for result, of_length in zip(found, setups, strict=True)
    ]


def run(setups: Sequence[Setup], device: torch.device, rounds: int) -> DecodeResult:
    """Of one length, on one rank; collective over all ranks, which get the same."""
    problem = setups[0].problem
    possible = [setup for setup in setups if setup.reason is None]
    asked = gate.question(Case(mask_name="causal", problem=replace(problem, causal=True)), "softmax")
    readings = [Reading(squares=_checked(setup, asked, device)) for setup in possible]
    errors = [_errors(one) for one in readings]
    allowed = [limits(setup, asked, device)["out"] for setup in possible]
    right = [i for i, found in enumerate(errors) if all(error <= allowed[i] for error in found.values())]
    floor = _timed([possible[i] for i in right], [readings[i] for i in right], device, rounds) if right else []
    gathered = gate.everywhere((readings, floor))
    of_ranks = list(zip(*(found for found, _ in gathered), strict=True))
    joined = iter(
        Measured(
            errors=errors[i],
            allowed=allowed[i],
            prefill=_slowest([r.prefill for r in of_ranks[i]]),
            decode=_slowest([r.decode for r in of_ranks[i]]),
            sent=[r.sent for r in of_ranks[i]] if i in right else [],
        )
        for i in range(len(possible))
    )
    measured = [next(joined) if setup.reason is None else Measured() for setup in setups]
    return DecodeResult(problem=problem, measured=measured, floor=_slowest([found for _, found in gathered]))


def _checked(setup: Setup, asked: oracle.Case, device: torch.device) -> dict[str, gate.Squares]:
    """A short prompt, and the rest of the sequence token by token and several at once."""
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
    return {
        "prefill": gate.compared(out, session.cp.shard(want[:prompt])),
        "decode": gate.compared(torch.cat(decoded), want[prompt:]),
    }


def _timed(setups: Sequence[Setup], readings: Sequence[Reading], device: torch.device, rounds: int) -> list[float]:
    """Fills the readings; returns seconds of a token's messages, round by round."""
    warm_up = 2 if device.type == "cuda" else 1
    tokens = STEPS * (rounds + warm_up)
    found = [_calls(setup, device, tokens, reading) for setup, reading in zip(setups, readings, strict=True)]
    size = setups[0].problem.size
    floors = [_floor(setups[0], device)] if size > 1 else []
    calls = [_once(call) for both in found for call in both] + [_once(floor) for floor in floors]
    timing.take_turns(calls, warm_up, device, lambda number: None)
    seconds = timing.take_turns(calls, rounds, device, lambda number: None)
    for i, reading in enumerate(readings):
        reading.prefill = [both.total for both in seconds[2 * i]]
        reading.decode = [both.total / STEPS for both in seconds[2 * i + 1]]
    return [both.total / STEPS for both in seconds[-1]] if floors else []


def _calls(setup: Setup, device: torch.device, tokens: int, reading: Reading) -> Calls:
    problem = setup.problem
    n, size = problem.seq_length, problem.size
    session = _session(setup, n, n + tokens, device)
    mine, one = (_random(problem, count, device) for count in (n // size, 1))

    def prefill() -> None:
        fresh = Session(
            session.cp, batch=problem.batch, capacity=session.slots.capacity, mesh=session.mesh, device=device
        )
        with fresh.prefill(n):
            fresh.attend(0, *mine)

    def decode() -> None:
        before = session.mesh.ledger.bytes(phase="decode")
        for _ in range(STEPS):
            with session.decode(1):
                session.attend(0, *one)
        reading.sent = (session.mesh.ledger.bytes(phase="decode") - before) // STEPS

    with session.prefill(n):
        session.attend(0, *mine)
    session.close([n] * problem.batch)
    return Calls(prefill, decode)


def _floor(setup: Setup, device: torch.device) -> Callable[[], object]:
    """The messages of as many tokens, each of the same bytes, with nothing in between."""
    p = setup.problem
    session = _session(setup, p.size, p.size, device)
    message = torch.zeros(1, p.batch, p.heads, p.v_head_dim + 1, dtype=accumulation_dtype(p.dtype), device=device)

    def floor() -> None:
        for _ in range(STEPS):
            tree.along(session.mesh, message, lambda lower, upper: lower)

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


def _once(call: Callable[[], object]) -> timing.Call:
    def timed(between: Callable[[], object]) -> None:
        call()
        between()

    return timed


def _errors(mine: Reading) -> dict[str, float]:
    """Over all ranks."""
    return {name: gate.relative(gate.everywhere(squares)) for name, squares in mine.squares.items()}


def _slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(times) for times in zip(*of_ranks, strict=True)]
