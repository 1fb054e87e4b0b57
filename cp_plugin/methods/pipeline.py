"""HeadPipeline: overlap communication with computation across groups of heads.

    heads 0 | gather | compute | return |
    heads 1          | gather  | compute | return |
    heads 2                    | gather  | compute | return |

The kernel calls stay whole and the collectives stay library collectives, where ATTENTION2D's own overlap variant (arXiv
2503.15758, Algorithms 4-6) breaks both into pieces. What is gathered at one time is one group's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cp_plugin.core.options import Option, Options, whole_number
from cp_plugin.core.problem import Problem
from cp_plugin.core.text import divisors
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Shard, Sums
from cp_plugin.kernels.merge import add_sums, merge
from cp_plugin.methods.moves import Moved, Staged, Stages, finish
from cp_plugin.methods.protocol import Attend

HEAD_GROUPS = Option(
    "head_groups",
    metavar="N",
    meaning="groups of heads between which communication and computation overlap",
    read=whole_number,
    write="a number of groups, such as 2",
    near=lambda ranks, groups: (1, 2, 4, 8),
)


@dataclass(frozen=True, slots=True)
class HeadPipeline:
    """Run ``inner`` on ``groups`` equal groups of key/value heads and their query heads, one stage apart."""

    groups: int
    inner: Staged

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        done = staggered(self.inner.forward_stages(*heads) for heads in self._groups(queries, kv))
        return merge(onto, Partial(*(torch.cat(parts, 2) for parts in zip(*done, strict=True))))

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        done = staggered(self.inner.backward_stages(*heads) for heads in self._groups(queries, kv))
        return add_sums(onto, Gradients(*(torch.cat(parts, 2) for parts in zip(*done, strict=True))))

    def _groups(self, queries: Queries, kv: KeyValues) -> Iterator[tuple[Queries, KeyValues]]:
        return zip(self._split(queries), self._split(kv), strict=True)

    def _split[S: Shard](self, shard: S) -> Iterator[S]:
        parts = zip(*(t.chunk(self.groups, 2) for t in shard.tensors), strict=True)
        return (type(shard)(*tensors, owners=shard.owners) for tensors in parts)


def staggered[T](work: Iterator[Stages[T]]) -> list[T]:
    """Run each item's three stages; stage 1 of the next item is posted before stage 2 of this one computes."""
    results: list[T] = []
    item = _started(work)
    before = None
    while item is not None:
        following = _started(work)
        next(item)
        if before is not None:
            results.append(finish(before))
        before, item = item, following
    assert before is not None
    return [*results, finish(before)]


def _started[T](work: Iterator[Stages[T]]) -> Stages[T] | None:
    """The next item, its first stage posted; None: there is no more."""
    item = next(work, None)
    if item is not None:
        next(item)
    return item


def in_head_groups(groups: int | None, method: Moved) -> Attend:
    """The method in so many groups of heads; as it is for one, or None."""
    return HeadPipeline(groups, method) if groups is not None and groups > 1 else method


def groups_do_not_divide(problem: Problem, options: Options) -> str | None:
    """Why the key/value heads cannot be divided into the groups asked for; None: they can."""
    groups = 1 if options.head_groups is None else options.head_groups
    if groups >= 1 and problem.kv_heads % groups == 0:
        return None
    return (
        f"--cp-head-groups {groups} does not divide the {problem.kv_heads} key/value heads of a rank: use one of "
        f"{divisors(problem.kv_heads)}"
    )


_LEAST_BYTES = {"nccl": 2**23, "gloo": 2**18}
"""What one rank's queries of one group should have: small messages and kernels cost more than they hide. On Gloo
measured on virtual clusters; on NCCL an estimate: a message of 8 MiB takes about 0.2 ms at 50 GB/s, ten times the start
of its collective, and a kernel on as many queries fills a GPU."""


def best_groups(problem: Problem, most: int = 8) -> int:
    """The number of groups when the user names none."""
    whole = problem.q_bytes
    return max(
        n
        for n in range(1, most + 1)
        if problem.kv_heads % n == 0 and (n == 1 or whole >= n * _LEAST_BYTES[problem.network])
    )
