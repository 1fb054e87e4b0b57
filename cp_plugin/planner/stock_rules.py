"""What stock Megatron's context parallelism can do, by ``--cp-comm-type`` and version of Transformer Engine.

Read from its releases, in ``attn_forward_func_with_cp`` and the choice of kernels around it. Prices are those of
``VERSION``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cp_plugin.engine.core.problem import Problem

VERSION = "2.21"
"""Of Transformer Engine: the newest whose rules are known."""
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """One thing that stock can do."""

    what: str
    since: Mapping[str, str]
    """Comm type -> the version of Transformer Engine from which it can; the others cannot."""

    def __str__(self) -> str:
        """``sliding windows: all_gather and a2a (since 2.0)``."""
        versions = dict.fromkeys(self.since.values())
        parts = [f"{_listed([t for t, v in self.since.items() if v == one])} (since {one})" for one in versions]
        return f"{self.what}: {', '.join(parts)}"


WINDOWS = Rule(what="sliding windows", since={"all_gather": "2.0", "a2a": "2.0"})
SINKS = Rule(what="attention sinks", since={"a2a": "2.8"})
DOCUMENTS = Rule(what="packed documents", since={"p2p": "2.0", "a2a": "2.10", "all_gather": "2.18", "a2a+p2p": "2.19"})
FLASH = Rule(
    what="packed documents with padding in between, by FlashAttention 3 and 4",
    since=dict.fromkeys(("p2p", "a2a"), "2.21"),
)
FP8 = Rule(what="FP8 attention of packed documents", since=dict.fromkeys(COMM_TYPES, "2.21"))
WIDE = Rule(what="heads of 256, backward, by FlashAttention 4", since=dict.fromkeys(COMM_TYPES, "2.21"))
RULES = (WINDOWS, SINKS, DOCUMENTS, FLASH, FP8, WIDE)


def needed(problem: Problem) -> Iterator[Rule]:
    """The rules that decide which comm types can run a problem."""
    if problem.window is not None:
        yield WINDOWS
    if problem.sink:
        yield SINKS
    if problem.documents:
        yield DOCUMENTS


def can(comm_type: str, problem: Problem) -> bool:
    """Return True if it supports the problem's windows, sinks and documents in ``VERSION``."""
    return all(comm_type in rule.since for rule in needed(problem))


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
