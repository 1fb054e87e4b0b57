"""MLCommons Chakra execution traces, for network simulators such as ASTRA-sim.

    Attention, Products, Memory   a COMP_NODE with the duration on the profile's device
    exchange                      a COMM_SEND_NODE and a COMM_RECV_NODE
    all_to_all_v                  these two for each peer with rows to send or receive
    other verbs                   a COMM_COLL_NODE of a process group, whose devices are in groups.json

A kernel depends on the one before it and on the messages waited for since; a message on what was computed before it was
posted, and on the previous message of its stream.

Source: https://github.com/mlcommons/chakra, ``schema/protobuf/et_def.proto`` of version 1.0.0. A trace is a
``GlobalMetadata`` followed by ``Node``s, each prefixed with its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Event, Post, Wait
from cp_plugin.planner.trace.timeline import Timeline

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
"""``NodeType``"""
COLLECTIVES = {"all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
"""``CollectiveCommType``"""
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29
_ATTRIBUTES = {
    "is_cpu_op": _BOOL,
    "comm_type": _INT64,
    "comm_size": _INT64,
    "comm_src": _INT32,
    "comm_dst": _INT32,
    "comm_tag": _INT32,
    "pg_name": _STRING,
}
"""Name -> field of ``AttributeProto`` expected by readers."""


class Node(NamedTuple):
    """A node of a trace, numbered by position."""

    name: str
    kind: int
    follows: tuple[int, ...] = ()
    """Numbers of the nodes it depends on."""
    micros: int = 0
    attributes: Mapping[str, int | str] = {}


def write(folder: Path, timeline: Timeline, stride: int = 1) -> None:
    """Write ``forward.N.et`` and ``backward.N.et`` for each device N, and ``groups.json``: the devices of each group.

    Args:
        folder: must exist.
        timeline: of all ranks.
        stride: as for ``simulate``; devices between two ranks do the same with their own peers.
    """
    groups: dict[tuple[int, ...], int] = {}
    for rank, program in timeline.programs.items():
        for name, events in (("forward", program.forward), ("backward", program.backward)):
            for offset in range(stride):
                trace = Trace(timeline, rank, stride, offset, groups)
                (folder / f"{name}.{trace.device(rank)}.et").write_bytes(encoded(trace.nodes(events)))
    numbered = {str(number): list(devices) for devices, number in groups.items()}
    (folder / "groups.json").write_text(json.dumps(numbered) + "\n")


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one device; its context-parallel peers are on every ``stride``-th device."""

    timeline: Timeline
    rank: int
    stride: int = 1
    offset: int = 0
    """Of the device from the first one of its rank."""
    groups: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Devices -> number of their process group, extended as needed."""

    def nodes(self, events: Iterable[Event]) -> Iterator[Node]:
        """In topological order."""
        made, clock = 0, 0.0
        ready: set[int] = set()
        newest: dict[str, set[int]] = {}
        posted: dict[int, set[int]] = {}
        for event in events:
            match event:
                case Wait():
                    ready |= posted[event.number]
                case Post():
                    messages = list(self._messages(event))
                    follows = tuple(sorted(ready | newest.get(event.stream, set())))
                    yield from (message._replace(follows=follows) for message in messages)
                    posted[event.number] = numbers = set(range(made, made + len(messages)))
                    newest[event.stream] = numbers or newest.get(event.stream, set())
                    made += len(messages)
                case _:
                    start, clock = clock, clock + kernel_time.seconds(event, self.timeline.cluster.device)
                    micros = round(clock * 1e6) - round(start * 1e6)  # integers without accumulated rounding
                    yield Node(type(event).__name__.lower(), COMPUTE, tuple(sorted(ready)), micros)
                    ready, made = {made}, made + 1

    def _messages(self, post: Post) -> Iterator[Node]:
        """Nodes for what this device sends and receives; none for empty messages."""
        members = np.flatnonzero(self.timeline.links.members(post.axis, self.rank)).tolist()
        if post.verb in COLLECTIVES:
            n, devices = len(members), tuple(map(self.device, members))
            group = self.groups.setdefault(devices, len(self.groups) + 1)
            kept = 1 if post.verb == "all_gather" else n  # ASTRA-sim's size is a rank's input
            size = {"comm_type": COLLECTIVES[post.verb], "comm_size": post.nbytes * kept // (n - 1)}
            yield Node(f"{post.verb} {post.stream}", COLLECTIVE, attributes={**size, "pg_name": str(group)})
            return
        exchanged = [(post.to, (post.nbytes, 0)), (post.source, (0, post.nbytes))]
        me = self.device(self.rank)
        for peer, (sent, received) in exchanged if post.verb == "exchange" else zip(members, post.parts, strict=True):
            if peer is not None and sent:
                yield self._message(post, SEND, me, self.device(peer), sent)
            if peer is not None and received:
                yield self._message(post, RECEIVE, self.device(peer), me, received)

    def _message(self, post: Post, kind: int, source: int, to: int, nbytes: int) -> Node:
        """Messages of one stream arrive in order and share a tag."""
        setup = self.timeline.setup
        tag = (*setup.axes, *setup.provider.extra_groups).index(post.stream)
        ends = {"comm_src": source, "comm_dst": to, "comm_size": nbytes, "comm_tag": tag}
        return Node(f"{post.verb} {post.stream}", kind, attributes=ends)

    def device(self, rank: int) -> int:
        return rank * self.stride + self.offset


def encoded(nodes: Iterable[Node]) -> bytes:
    messages = chain([_field(1, "1.0.0")], (_encoded(number, node) for number, node in enumerate(nodes)))
    return b"".join(_varint(len(message)) + message for message in messages)


def _encoded(number: int, node: Node) -> bytes:
    fields: list[tuple[int, int | str | bytes]] = [(1, number), (2, node.name), (3, node.kind)]
    fields += [(5, follows) for follows in node.follows]
    fields.append((7, node.micros))
    for name, value in {"is_cpu_op": 0, **node.attributes}.items():
        fields.append((10, _field(1, name) + _field(_ATTRIBUTES[name], value)))
    return b"".join(_field(*field) for field in fields)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
