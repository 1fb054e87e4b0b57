"""Check the process groups of all ranks, and summarise them by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cp_plugin.megatron.planned_groups import MEGATRONS, Group, Member

_SHOWN = 3


class Summary(NamedTuple):
    """The groups of one name."""

    name: str
    groups: int
    size: int
    inside: int
    """Groups within one node."""
    example: tuple[int, ...]
    """The ranks of the first group."""
    exchanged: bool
    """Whether the ranks have exchanged their numbers through it."""


def faults(members: Sequence[Member], sizes: Mapping[str, int]) -> list[str]:
    """Faults, one line each; none if every rank is in exactly one group of each name, whose members are, in order,
    the ranks that differ from it along the group's axes only.

    Args:
        members: by rank.
        sizes: Megatron's axis -> its size.
    """
    found = [*_places(members, sizes)]
    for name in dict.fromkeys(name for member in members for name in member.groups):
        wrong = [text for rank in range(len(members)) if (text := _fault(members, rank, name)) is not None]
        found += wrong[:_SHOWN]
        if len(wrong) > _SHOWN:
            found.append(f"{name}: and {len(wrong) - _SHOWN} more ranks")
    return found


def summaries(members: Sequence[Member], per_node: int) -> list[Summary]:
    """Groups of more than one rank, by name."""
    found: dict[str, dict[tuple[int, ...], Group]] = {}
    for member in members:
        for name, group in member.groups.items():
            if len(group.ranks) > 1:
                found.setdefault(name, {}).setdefault(group.ranks, group)
    return [
        Summary(
            name=name,
            groups=len(groups),
            size=len(next(iter(groups))),
            inside=sum(len({rank // per_node for rank in ranks}) == 1 for ranks in groups),
            example=min(groups),
            exchanged=all(group.heard for group in groups.values()),
        )
        for name, groups in found.items()
    ]


def _places(members: Sequence[Member], sizes: Mapping[str, int]) -> list[str]:
    """Faults in the ranks' coordinates: duplicates, and sizes of axes other than the flags'."""
    if math.prod(sizes.values()) != len(members):
        return [f"{dict(sizes)} are not {len(members)} ranks"]
    by_place: dict[tuple[int, ...], int] = {}
    found = []
    for rank, member in enumerate(members):
        place = tuple(member.coordinates[axis] for axis in MEGATRONS)
        other = by_place.setdefault(place, rank)
        if other != rank:
            found.append(f"ranks {other} and {rank} are both at {dict(zip(MEGATRONS, place, strict=True))}")
        found += [
            f"rank {rank} is number {n} along {axis}, which has {sizes[axis]}"
            for axis, n in zip(MEGATRONS, place, strict=True)
            if not 0 <= n < sizes[axis]
        ]
    return found[:_SHOWN]


def _fault(members: Sequence[Member], rank: int, name: str) -> str | None:
    group = members[rank].groups.get(name)
    if group is None:
        return f"{name}: rank {rank} is in no such group"
    if group.made != 1:
        return f"{name}: rank {rank} is in {group.made} groups of that name"
    right = _expected(members, rank, group)
    if group.ranks != right or len(right) != math.prod(group.axes.values()):
        axes = " x ".join(f"{axis} {n}" for axis, n in group.axes.items())
        return (
            f"{name}: rank {rank} has {list(group.ranks)}; those that differ from it only along {axes} are "
            f"{list(right)}"
        )
    if group.heard and group.heard != group.ranks:
        return f"{name}: rank {rank} has {list(group.ranks)}, but {list(group.heard)} answered"
    return None


def _expected(members: Sequence[Member], rank: int, group: Group) -> tuple[int, ...]:
    """The ranks with the same coordinates on all other axes, in order along the group's axes."""

    def place(member: Member, axes: Sequence[str]) -> tuple[int, ...]:
        return tuple(member.coordinates.get(axis, -1) for axis in axes)

    fixed = [axis for axis in group.among if axis not in group.axes]
    here = place(members[rank], fixed)
    alike = [n for n, member in enumerate(members) if place(member, fixed) == here]
    return tuple(sorted(alike, key=lambda n: place(members[n], list(group.axes))))
