"""``cp-plugin verify --decode``: run providers as generation does, and compare with attention on one device.

    prompts    by the provider, in one part and in two; every second one ends at half of the padded length
    decode     1, 1, 3 and as many tokens as there are ranks at a time

Outputs are compared with float64 attention of the whole sequences, within the limits of ``verify``. Decode must also
be bitwise equal on all ranks, send the bytes of ``tree.bytes_sent``, and spread tokens evenly. Linear attention
passes a state on (``ContextParallel.extend_linear``) and sends nothing in decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Inputs, Setup
from cp_plugin.engine.comm import ThreadMesh
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.mask import CAUSAL
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.inference import Session, slots_for, tree
from cp_plugin.engine.kernels import blocks
from cp_plugin.engine.linear import rules
from cp_plugin.engine.linear.tokens import tokens_of
from cp_plugin.engine.methods import fp8
from cp_plugin.engine.methods.protocol import Kind, Provider
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.testing import verify as training
from cp_plugin.testing.oracle import answer, make_inputs, relative_errors
from cp_plugin.testing.verify import HALF_FACTOR, LIMITS, Result

PREFILL, DECODE = ("prefill", "chunked_prefill"), ("decode", "chunked_decode")
"""What is compared: prompts prefilled at once, and in two chunks."""


def steps(size: int) -> tuple[int, ...]:
    """Tokens of each decode step on this many ranks."""
    return (1, 1, 3, size)


class Texts(NamedTuple):
    """A batch of prompts, the tokens that follow them, and the right answer."""

    inputs: Inputs
    """The padded prompts, then the tokens to decode: ``[n + m, b, ...]``."""
    lengths: tuple[int, ...]
    """Of the prompts."""
    steps: tuple[int, ...]
    """Tokens of each decode step."""
    want: tuple[Tensor, ...] = ()
    """For each sequence: float64 ``[length + m, 1, h, e]``."""

    def texts(self) -> Iterator[Inputs]:
        """Each sequence without padding."""
        whole = self.inputs.q.size(0)
        for i, length in enumerate(self.lengths):
            rows = [*range(length), *range(whole - sum(self.steps), whole)]
            yield Inputs(*(y if y is None or y.dim() == 1 else y[rows, i : i + 1] for y in self.inputs))


class Report(NamedTuple):
    """One rank's report."""

    decoded: tuple[Tensor, ...]
    held: tuple[list[list[int]], ...]
    """Tokens of each sequence on each rank, after each prefill and each decode; empty for linear attention."""
    sent: int
    """Bytes, in both decodes."""
    errors: Mapping[str, float]
    """Set on the first rank only, as ``limits``."""
    limits: Mapping[str, float]


def plan(chosen: Sequence[str | Provider], problems: Sequence[Problem], options: Options) -> list[Setup]:
    """As ``verify.plan``, without setups that differ in the backward pass only."""
    distinct: dict[Any, Setup] = {}
    for setup in training.plan(chosen, problems, options):
        reason, alike = setup.reason or _reason(setup), replace(setup.options, backward=None)
        setup = replace(setup, options=alike, reason=reason)
        distinct.setdefault((setup.provider.name, setup.problem, alike), setup)
    return list(distinct.values())


def _reason(setup: Setup) -> str | None:
    """Return why the setup's prompts cannot be split into two chunks; None if they can."""
    n, size = setup.problem.seq_length, setup.problem.size
    if n >= (least := 2 * get_layout(setup.layout).divisor(size)):
        return None
    return (
        f"--seq-length {n}: a prompt in two parts needs {least} tokens or more on {size} ranks in the {setup.layout} "
        "layout"
    )


def make_texts(problem: Problem, kind: Kind) -> Texts:
    """Deterministic random inputs and their reference."""
    inputs = make_inputs(replace(problem, seq_length=problem.seq_length + sum(steps(problem.size))))
    case = Texts(inputs, _lengths(problem), steps(problem.size))
    alone = replace(problem, batch=1, size=1)
    return case._replace(want=tuple(answer(x, replace(alone, seq_length=x.q.size(0)), kind)[0] for x in case.texts()))


def _lengths(problem: Problem) -> tuple[int, ...]:
    """Return the prompts' lengths."""
    n = problem.seq_length
    return tuple(n if i % 2 else n // 2 + 1 for i in range(problem.batch))


Attended = tuple[Tensor, Tensor, list[list[list[int]]]]
"""Outputs of padded prompts ``[n, b, h, e]``, of decoded tokens ``[m, b, h, e]``, and ``Report.held``."""


def _softmax(cp: ContextParallel, setup: Setup, case: Texts, parts: Sequence[int]) -> Attended:
    x, n, threads = case.inputs, parts[-1], isinstance(cp.mesh, ThreadMesh)
    session = Session(
        cp,
        batch=len(case.lengths),
        capacity=slots_for(x.q.size(0), cp.size),
        group=None if threads or cp.size == 1 else dist.group.WORLD,
        mesh=cp.mesh.duplicate({tree.AXIS: cp.size}) if threads else None,
        fp8=setup.options.fp8 is not None,
        device=x.q.device,
    )
    prompt, decoded, held = [], [], []
    for first, stop in pairwise(parts):
        with session.prefill(stop - first):
            out = session.attend("layer", *(cp.shard(y[first:stop]) for y in x[:3]))
        prompt.append(cp.unshard(out))
    session.close(case.lengths)
    held.append([list(ranks) for ranks in session.slots.held])
    for first, stop in pairwise(accumulate(case.steps, initial=n)):
        with session.decode(stop - first):
            decoded.append(session.attend("layer", *(y[first:stop] for y in x[:3])))
    held.append(session.slots.held)
    return torch.cat(prompt), torch.cat(decoded), held


def _linear(cp: ContextParallel, setup: Setup, case: Texts, parts: Sequence[int]) -> Attended:
    x, n, state = case.inputs, parts[-1], None
    whole = tokens_of(*x[:3], *x[4:])
    decay = None if whole.log_decay is None else whole.log_decay.squeeze(3)
    prompt, decoded, ends = [], [], torch.tensor(case.lengths, device=x.q.device)
    for first, stop in pairwise(parts):
        q, k, v = (cp.shard(y[first:stop]) for y in x[:3])
        kept = (cp.positions(stop - first, ends.device) + first).unsqueeze(1) < ends
        passing, beta = (None if y is None else cp.shard(y[first:stop]) for y in (decay, x.beta))
        out, state = cp.extend_linear(q, k, v, passing, beta=beta, state=state, kept=kept)
        prompt.append(cp.unshard(out))
    with cp.mesh.ledger.phase("decode"):
        for first, stop in pairwise(accumulate(case.steps, initial=n)):
            out, state = rules.run(whole.select(slice(first, stop)), state)
            decoded.append(out.to(x.q.dtype))
    return torch.cat(prompt), torch.cat(decoded), []


def _distances(case: Texts, texts: Sequence[Tensor]) -> tuple[float, float]:
    """Relative errors of the outputs of all prompts, and of all decoded tokens; texts: of each sequence, both."""
    m = sum(case.steps)
    got, want = (
        [torch.cat([x[part].flatten() for x in some]) for part in (slice(-m), slice(-m, None))]
        for some in (texts, case.want)
    )
    first, second = relative_errors(got, want).values()
    return first, second


def _limits(setup: Setup, case: Texts, device: torch.device) -> tuple[float, float]:
    """The largest allowed errors of prompts and of decoded tokens, which are not rounded to be sent: see ``verify``."""
    if setup.problem.dtype in LIMITS:
        return (LIMITS[setup.problem.dtype],) * 2
    rounded = fp8.four_bits if setup.options.fp8 is not None else torch.clone
    alone = ([_alone(setup, text, device, sent, rounded) for text in case.texts()] for sent in (rounded, torch.clone))
    (prompt_error, _), (_, decoded_error) = (_distances(case, texts) for texts in alone)
    return HALF_FACTOR * prompt_error, HALF_FACTOR * decoded_error


def _alone(
    setup: Setup, text: Inputs, device: torch.device, sent: Callable[[Tensor], Tensor], kept: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute a text on one device, forward only: by one kernel call, or by linear attention as in training.

    Args:
        sent: applied to queries and outputs of softmax attention.
        kept: applied to its keys and values.
    """
    q, k, v, _, decay, beta = (None if y is None else y.to(device) for y in text)
    if setup.provider.kind == "linear":
        with torch.no_grad():
            cp = ContextParallel(setup.provider, group=None, backend=setup.options.backend)
            return cp.linear_attention(q, k, v, decay, beta=beta)
    kernel, whole = blocks.choose(setup.options, setup.problem, device).kernel, (range(q.size(0)),)
    block = Block(whole, whole, CAUSAL, Scores.from_call(q))
    part = kernel.forward(Queries(sent(q)), KeyValues(kept(k), kept(v)), block)
    assert part is not None, "it finds the block empty"
    return sent(part.out.to(q.dtype))


def _measure(setup: Setup, cp: ContextParallel, case: Texts, device: torch.device) -> Report:
    n, divisor = setup.problem.seq_length, cp.layout.divisor(cp.size)
    moved = case._replace(inputs=Inputs(*(None if y is None else y.to(device) for y in case.inputs)))
    attend = _softmax if setup.provider.kind == "softmax" else _linear
    before = cp.mesh.ledger.bytes(phase="decode")
    runs = [attend(cp, setup, moved, parts) for parts in ((0, n), (0, -(-n // (2 * divisor)) * divisor, n))]
    sent = cp.mesh.ledger.bytes(phase="decode") - before
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    if cp.index == 0:
        prompts_limit, decoded_limit = _limits(setup, case, device)
        limits = dict.fromkeys(PREFILL, prompts_limit) | dict.fromkeys(DECODE, decoded_limit)
        for (prompt, decoded, _), *names in zip(runs, PREFILL, DECODE, strict=True):
            texts = [torch.cat((prompt[:length, i], decoded[:, i])) for i, length in enumerate(case.lengths)]
            errors |= zip(names, _distances(case, texts), strict=True)
    held = tuple(one for *_, books in runs for one in books)
    return Report(tuple(decoded.cpu() for _, decoded, _ in runs), held, sent, errors, limits)


def _judge(setup: Setup, reports: list[Report]) -> Result:
    tokens = 2 * setup.problem.batch * sum(steps(setup.problem.size))
    return Result(
        setup=setup,
        errors=reports[0].errors,
        limits=reports[0].limits,
        failure=next(_faults(setup, reports), ""),
        sent=tuple(one.sent // tokens for one in reports),
    )


def _faults(setup: Setup, reports: Sequence[Report]) -> Iterator[str]:
    """Whatever differs between ranks, from the formula for bytes, or from an even division of tokens."""
    p = setup.problem
    for rank, one in enumerate(reports):
        if one.held != reports[0].held:
            yield f"ranks 0 and {rank} disagree on who holds which token"
        for name, a, b in zip(DECODE, reports[0].decoded, one.decoded, strict=True):
            if not torch.equal(a, b):
                yield f"{name}: the outputs of ranks 0 and {rank} differ, by up to {(a - b).abs().max():.1e}"
        want = 0
        if setup.provider.kind == "softmax":
            sizes = (p.batch, p.heads, p.v_head_dim, p.wide)
            want = 2 * sum(tree.bytes_sent(p.size, rank, tokens, *sizes) for tokens in steps(p.size))
        if one.sent != want:
            yield f"rank {rank} sent {one.sent} bytes in decode, and the formula says {want}"
    cyclic = get_layout(setup.layout).cyclic
    for step, sequences in enumerate(reports[0].held):
        decoded = sum(steps(p.size)) if step % 2 else 0
        for i, (ranks, length) in enumerate(zip(sequences, _lengths(p), strict=True)):
            if sum(ranks) != length + decoded:
                yield f"sequence {i}: ranks hold {sum(ranks)} of its {length + decoded} tokens"
            if (cyclic or length == p.seq_length) and max(ranks) - min(ranks) > 1:
                yield f"sequence {i}: ranks hold {min(ranks)} to {max(ranks)} of its tokens"


GENERATION = training.Check(make_texts, _measure, _judge)
