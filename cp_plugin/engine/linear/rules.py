"""Rules by which tokens write to a state, and everything else that depends on the rule.

    added    their values are added to a decaying state                    ``decayed``
    delta    they replace what the state has under their keys              ``delta``; they have a beta

A new rule is a file with a ``Segment`` and an entry here.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cp_plugin.engine.linear import decayed
from cp_plugin.engine.linear.delta import Delta
from cp_plugin.engine.linear.segment import Forward, Run, Segment
from cp_plugin.engine.linear.tokens import Tokens


class Rule(NamedTuple):
    """How tokens write to a state, in plain torch chunk by chunk, and by kernels."""

    segment: type[Segment]
    forward: Forward
    run: Run
    fla: tuple[str, str, str]
    """Kernels of flash-linear-attention (``fla.ops``): without decay, with one per head, with one per key dimension."""
    matrix: bool = False
    """``Segment.factor`` is a matrix, which a kernel that takes an initial state computes, too (``Widened``)."""


ADDED = Rule(decayed.Decayed, decayed.forward, decayed.run, ("simple_gla", "simple_gla", "gla"))
_FLA = "delta_rule", "gated_delta_rule", "kda"
DELTA = Rule(Delta, lambda x: Delta(x).run()[0], lambda x, before: Delta(x).run(before), _FLA, matrix=True)


def rule_of(x: Tokens) -> Rule:
    """The rule by which these tokens write."""
    return ADDED if x.beta is None else DELTA


def forward(x: Tokens) -> Tensor:
    """Causal linear attention in plain torch, as ``segment.Forward``."""
    return rule_of(x).forward(x)


def run(x: Tokens, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Continue a sequence, as ``segment.Run``."""
    return rule_of(x).run(x, before)
