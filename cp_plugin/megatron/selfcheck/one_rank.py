"""One context-parallel rank for a while: in the block this process computes whole sequences, each rank the same.

    context parallelism          -> this rank alone
    tensor x context parallelism -> this rank's tensor-parallel ranks (and so on: each group without the other CP ranks)
    data x context, experts      -> as they are: the ranks hold equal copies, whose average, or quotient of sums, is
                                    one rank's. So nothing that reduces gradients is touched, however it is built

Groups are swapped wherever they hang: in Megatron's and the script's modules, in modules of the model, in their helper
objects and collections of groups; sizes that these keep (``cp_size``) with them. A helper that derived more from its
group (``MambaContextParallel``) is built anew from its own attributes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.megatron.patches import patching, rope
from cp_plugin.megatron.selfcheck.restored import namespaces

_DIVIDES = re.compile("CONTEXT_PARALLEL|TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
"""Megatron's names of groups whose ranks divide sequences; those over which gradients are averaged are left."""
_SIZE, _RANK = (re.compile(rf"^_?(cp|context_parallel)(_world)?_{what}$", re.IGNORECASE) for what in ("size", "rank"))

_OF_A_RANK = ("feat_dim_split",)  # of GatedDeltaNet
"""Sizes that a module computed for a context-parallel rank when it was built."""


class OneRank:
    """What replaces each process group; made once, collectively over all ranks."""

    def __init__(self) -> None:
        own = dist.get_process_group_ranks(parallel_state.get_context_parallel_group())
        self.size = len(own)
        place = {rank: ranks.index(rank) for rank, ranks in enumerate(gather_objects(own))}
        known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group, ranks in distributed_c10d._world.pg_group_ranks.items():
            known.setdefault(tuple(ranks), group)
        self.to: dict[int, dist.ProcessGroup] = {}
        self.groups = self._divided()
        for group in self.groups:
            part = tuple(r for r in dist.get_process_group_ranks(group) if place[r] == place[dist.get_rank()])
            if part not in known:
                known[part] = dist.new_group(list(part), use_local_synchronization=True)
            self.to[id(group)] = known[part]

    @staticmethod
    def _divided() -> list[dist.ProcessGroup]:
        """Groups that hold several context-parallel ranks of one sequence, in a common order."""
        own = set(dist.get_process_group_ranks(parallel_state.get_context_parallel_group()))
        groups: dict[int, dist.ProcessGroup] = {}
        for name, value in sorted(vars(parallel_state).items()):
            for group in value if isinstance(value, list) else [value]:
                if not isinstance(group, dist.ProcessGroup) or not _DIVIDES.search(name):
                    continue
                if len(own & set(dist.get_process_group_ranks(group))) > 1:
                    groups[id(group)] = group
        return list(groups.values())

    def used(self) -> tuple[int, int]:
        """Return how many collectives have begun in the swapped groups, and in a script's own groups of the same ranks.

        Of the latter, it is not known whether they divide sequences or average over data.
        """
        alike = {tuple(dist.get_process_group_ranks(group)) for group in self.groups}
        own = [
            group
            for group, ranks in distributed_c10d._world.pg_group_ranks.items()
            if tuple(ranks) in alike and group.group_desc == "undefined"
        ]
        swapped, others = (
            sum(group._get_sequence_number_for_group() for group in groups if group.size() > 1)
            for groups in (self.groups, own)
        )
        return swapped, others

    @contextmanager
    def alone(self, roots: Iterable[Any], args: Any) -> Iterator[None]:
        """Leave one context-parallel rank in the block.

        Args:
            roots: the model's chunks, and other objects that may hold process groups.
            args: Megatron's; None in other loops.
        """
        with ExitStack() as back:
            back.callback(rope.forget_cached_embeddings)
            for names in (*map(vars, patching.importers().values()), *namespaces([*roots, args])):
                for name, value in list(names.items()):
                    if (new := self._replace_value(names, name, value)) is not None:
                        back.callback(names.__setitem__, name, value)
                        names[name] = new
            rope.forget_cached_embeddings()
            yield

    def _replace_value(self, names: Mapping[str, Any], name: str, value: Any) -> Any:
        """The value in the place of one of these names; None: it stays."""
        if id(value) in self.to:
            return self.to[id(value)]
        if isinstance(value, list) and any(id(one) in self.to for one in value):
            return [self.to.get(id(one), one) for one in value]
        if type(value) is int and _SIZE.match(name) and value == self.size:
            return 1
        if name in _OF_A_RANK and "cp_size" in names:
            return type(value)(self.size * one for one in value)
        if type(value) is int and _RANK.match(name):
            return 0
        return None if isinstance(value, torch.nn.Module) else self._rebuilt(value)

    def _rebuilt(self, helper: Any) -> Any:
        """A helper object that keeps what it was built from, built for one rank; None: of another kind."""
        if not str(type(helper).__module__).startswith("megatron.") or not hasattr(helper, "__dict__"):
            return None
        held = vars(helper)
        if not any(id(value) in self.to for value in held.values()):
            return None
        names = list(inspect.signature(type(helper).__init__).parameters)[1:]
        if not names or not all(name in held for name in names):
            return None
        return type(helper)(**{name: self.to.get(id(held[name]), held[name]) for name in names})
