"""The ideal: a rank's share of the work in one call of the same kernel, without communication.

    softmax   1 / size of the heads; where they do not divide, as many queries of all heads as a rank has tokens, taken
              where they see 1 / size of all pairs, and the keys that they see
    linear    as many tokens as a rank has

All ranks compute at the same time, so ranks that share a processor share it in the ideal, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import Inputs, Setup, of_kernel, shapes
from cp_plugin.cli.bench.cases import Case
from cp_plugin.cli.bench.contestants import Provided
from cp_plugin.core.block import Block, Scores
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import blocks


class Share(NamedTuple):
    factor: float
    """1 / size of all the work, over the work of one step."""
    step: Callable[..., tuple[Tensor, ...]]
    """Forward, the callback that it is given, backward."""


def share(case: Case, setup: Setup | None, device: torch.device) -> Share:
    """For a provider's kernel, or, without a setup, for a peer's: the one of ``--cp-backend auto``."""
    if setup is not None and setup.provider.kind == "linear":
        return _of_linear(case, setup, device)
    return _of_softmax(case, Options() if setup is None else setup.options, device)


def random_parts(problem: Problem, tokens: int, device: torch.device) -> Inputs:
    """Random inputs of this many tokens."""
    like = shapes(problem, tokens)
    q, k, v, dout = (torch.randn_like(x, device=device) for x in like[:4])
    decay = None if like.log_decay is None else -torch.rand_like(like.log_decay, device=device, dtype=torch.float32)
    return Inputs(q, k, v, dout, decay)


class Run(NamedTuple):
    """Consecutive queries."""

    first: int
    pairs: int
    """Visible (query, key) pairs."""


def busy_as_one_rank(case: Case) -> Run:
    """The first run of as many queries as a rank has whose visible pairs come closest to 1 / size of all."""
    first, last = case.visible
    rows = case.problem.seq_length // case.problem.size
    before = np.concatenate(([0], np.cumsum(last - first)))
    pairs = before[rows:] - before[:-rows]
    number = int(np.abs(pairs - case.pairs / case.problem.size).argmin())
    return Run(number, int(pairs[number]))


def _of_softmax(case: Case, options: Options, device: torch.device) -> Share:
    problem, size = case.problem, case.problem.size
    whole = range(problem.seq_length)
    if problem.heads % size == 0 and problem.kv_heads % size == 0:
        rows, keys, factor = whole, whole, 1.0
        problem = replace(problem, heads=problem.heads // size, kv_heads=problem.kv_heads // size)
    else:
        run, (first, last) = busy_as_one_rank(case), case.visible
        rows = whole[run.first : run.first + len(whole) // size]
        keys = whole[int(first[rows].min()) : int(last[rows].max())]
        factor = case.pairs / size / run.pairs
    block = Block((rows,), (keys,), case.mask, Scores(problem.head_dim**-0.5))
    q, _, _, dout, *_ = random_parts(problem, len(rows), device)
    _, k, v, *_ = random_parts(problem, len(keys), device)
    kernel = blocks.choose(options, problem, device).kernel
    return Share(factor, lambda between=lambda: None: of_kernel(kernel, (q, k, v, dout), block, between=between))


def _of_linear(case: Case, setup: Setup, device: torch.device) -> Share:
    tokens = case.problem.seq_length // case.problem.size
    alone = replace(case.problem, size=1, seq_length=tokens)
    ends = (*(b for b in case.bounds if b < tokens), tokens) if case.bounds else ()
    cp = ContextParallel(setup.provider, group=None, backend=setup.options.backend)
    provided = Provided(cp, setup, alone, torch.tensor(ends) if ends else None)
    return Share(1.0, partial(provided.step, random_parts(case.problem, tokens, device)))
