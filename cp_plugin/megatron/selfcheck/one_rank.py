"""One context-parallel rank for a while: in the block this process computes whole sequences, each rank the same.

    context parallelism          -> this rank alone
    tensor x context parallelism -> this rank's tensor-parallel ranks (and so on: each group without the other CP ranks)
    data x context, experts      -> as they are: the ranks hold equal copies, whose average, or quotient of sums, is
                                    one rank's. So nothing that reduces gradients is touched, however it is built

Groups are swapped wherever they hang: in Megatron's and the script's modules, in modules of the model, in their helper
objects and collections of groups; sizes that these keep (``cp_size``) with them. A helper that derived more from its
group (``MambaContextParallel``) is built anew from its own attributes. Experts are those that the ranks chose
(``Choices``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import distributed_c10d

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.megatron import runtime
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
        self.groups: list[dist.ProcessGroup] = []
        for group in self._divided():
            part = tuple(r for r in dist.get_process_group_ranks(group) if place[r] == place[dist.get_rank()])
            if part not in known:
                known[part] = dist.new_group(list(part), use_local_synchronization=True)
            self.to[id(group)] = known[part]
            self.groups.append(group)

    @staticmethod
    def _divided() -> list[dist.ProcessGroup]:
        """Groups that hold several context-parallel ranks of one sequence, in a common order."""
        own = set(dist.get_process_group_ranks(parallel_state.get_context_parallel_group()))
        found: dict[int, dist.ProcessGroup] = {}
        for name, value in sorted(vars(parallel_state).items()):
            for group in value if isinstance(value, list) else [value]:
                if not isinstance(group, dist.ProcessGroup) or not _DIVIDES.search(name):
                    continue
                if len(own & set(dist.get_process_group_ranks(group))) > 1:
                    found[id(group)] = group
        return list(found.values())

    def used(self) -> tuple[int, int]:
        """How many collectives have begun in the swapped groups, and in a script's own groups of the same ranks.

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
        """In the block there is one context-parallel rank.

        Args:
            roots: the model's chunks, and other objects that may hold process groups.
            args: Megatron's; None in other loops.
        """
        with ExitStack() as back:

            def put(owner: MutableMapping[str, Any], name: str, value: Any) -> None:
                back.callback(owner.__setitem__, name, owner[name])
                owner[name] = value

            back.callback(rope.forget_cached_embeddings)
            for module in patching.importers().values():
                for name, value in list(vars(module).items()):
                    if (new := self._swapped(value)) is not None:
                        put(vars(module), name, new)
            for names in namespaces([*roots, args]):
                for name, value in list(names.items()):
                    if (new := self._replace_value(names, name, value)) is not None:
                        put(names, name, new)
            rope.forget_cached_embeddings()
            yield

    def _swapped(self, value: Any) -> Any:
        """The group, or groups, in the place of these; None: no such groups."""
        if isinstance(value, list) and any(id(one) in self.to for one in value):
            return [self.to.get(id(one), one) for one in value]
        return self.to.get(id(value))

    def _replace_value(self, names: Mapping[str, Any], name: str, value: Any) -> Any:
        """The value in the place of one of these names; None: it stays."""
        if (new := self._swapped(value)) is not None:
            return new
        if type(value) is int and _SIZE.match(name) and value == self.size:
            return 1
        if name in _OF_A_RANK and "cp_size" in names:
            return type(value)(self.size * one for one in value)
        if type(value) is int and _RANK.match(name):
            return 0
        return None if isinstance(value, torch.nn.Module) else self._rebuilt(value)

    def _rebuilt(self, helper: Any) -> Any:
        """A helper object that keeps what it was built from, built for one rank; None: of another kind."""
        if not type(helper).__module__.startswith("megatron.") or not hasattr(helper, "__dict__"):
            return None
        held = vars(helper)
        if not any(id(value) in self.to for value in held.values()):
            return None
        names = list(inspect.signature(type(helper).__init__).parameters)[1:]
        if not names or not all(name in held for name in names):
            return None
        return type(helper)(**{name: self.to.get(id(held[name]), held[name]) for name in names})


_topk = torch.topk


class Choices:
    """Experts as routers chose them in one step, by token: in other steps, rounding errors could choose others.

    Each step chooses where documents place tokens, and in packs of several rows, which Megatron divides for experts. A
    choice is replayed only as far as it is one: what is better by more than rounding is a difference.
    """

    def __init__(self, config: Any, layout: Layout, padded: int, tokens: int, rows: int) -> None:
        """
        Args:
            config: the model's.
            layout: of tokens between the layers.
            padded, tokens: lengths of the sequences, with padding and without.
            rows: of a micro-batch.
        """
        packs = rows if runtime.packs() else 1
        free = layout.name == DOCUMENTS.name or packs > 1
        self._experts = bool(getattr(config, "num_moe_experts", None)) and not free
        cp, rank = (getattr(parallel_state, f"get_context_parallel_{what}")() for what in ("world_size", "rank"))
        parts = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        part = parallel_state.get_tensor_model_parallel_rank() if parts > 1 else 0
        if self._experts:
            self._mine = layout.positions(padded, cp, rank).chunk(parts)[part]
            self._alone = torch.arange(tokens).chunk(parts)[part]
        self._chosen: list[Tensor] = []  # this rank's, [tokens * b, k]
        self._of_all: list[Tensor] = []  # [whole sequence, b, k]
        self.apart = 0.0
        """By how much the best experts' scores are above those of the replayed ones, relative to the largest score."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In the block, note choices; at its end tell them to all tensor- and context-parallel ranks, collective."""

        def topk(scores: Tensor, k: int, *args: Any, **named: Any) -> Any:
            found = _topk(scores, k, *args, **named)
            if self._routes(scores, self._mine, *args, **named):
                self._chosen.append(found[1].detach())
            return found

        if not self._experts:
            yield
            return
        with patching.lent(torch, topk=topk):
            yield
        group = parallel_state.get_tensor_and_context_parallel_group()
        parts = gather_objects((self._mine, [one.cpu() for one in self._chosen]), group)
        shapes = {tuple(tuple(one.shape) for one in chosen) for _, chosen in parts}
        if len(shapes) > 1:
            return
        for number, one in enumerate(self._chosen):
            rows = one.size(0) // len(self._mine)
            whole = one.new_zeros(max(int(where.max()) for where, _ in parts) + 1, rows, one.size(1))
            for where, chosen in parts:
                whole[where.to(one.device)] = chosen[number].to(one.device).view(len(where), *whole.shape[1:])
            self._of_all.append(whole)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """In the block, a rank that has whole sequences chooses as recorded."""
        left = iter(self._of_all)

        def topk(scores: Tensor, k: int, *args: Any, **named: Any) -> Any:
            best = _topk(scores, k, *args, **named)
            whole = next(left, None) if self._routes(scores, self._alone, *args, **named) else None
            if whole is None or whole.numel() * len(self._alone) != best[1].numel() * len(whole):
                return best
            chosen = whole[self._alone.to(whole.device)].flatten(0, 1)
            values = scores.gather(1, chosen)
            above = best[0].sort(1)[0] - values.sort(1)[0]
            self.apart = max(self.apart, float(above.max() / scores.abs().max().clamp(min=1e-30)))
            return torch.return_types.topk((values, chosen))

        with patching.lent(torch, topk=topk) if self._experts else nullcontext():
            yield

    @staticmethod
    def _routes(scores: Tensor, tokens: Tensor, dim: int = -1, *_: Any, **__: Any) -> bool:
        """Whether something is chosen for each token: experts, or groups of them."""
        return scores.dim() == 2 and scores.size(0) % len(tokens) == 0 and dim in (1, -1)
