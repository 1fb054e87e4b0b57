"""Traces for ASTRA-sim, read back by protobuf: what a rank does, in its order, and what it sends to whom."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, proto, text_format, unknown_fields
from typer.testing import CliRunner

from cp_plugin.attention.setups import settled
from cp_plugin.cli.app import app
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Memory, Post, Products, Wait
from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.price import on
from cp_plugin.planner.trace import chakra
from cp_plugin.planner.trace.timeline import Timeline, simulate
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel, problem

_SCHEMA = """
name: "et_def.proto" package: "ChakraProtoMsg" syntax: "proto3"
message_type { name: "GlobalMetadata" field { name: "version" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type {
  name: "AttributeProto"
  oneof_decl { name: "value" }
  field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "int32_val" number: 7 type: TYPE_INT32 label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "int64_val" number: 9 type: TYPE_INT64 label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "bool_val" number: 27 type: TYPE_BOOL label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "string_val" number: 29 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
}
message_type {
  name: "Node"
  field { name: "id" number: 1 type: TYPE_UINT64 label: LABEL_OPTIONAL }
  field { name: "name" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "type" number: 3 type: TYPE_INT32 label: LABEL_OPTIONAL }
  field { name: "data_deps" number: 5 type: TYPE_UINT64 label: LABEL_REPEATED }
  field { name: "duration_micros" number: 7 type: TYPE_UINT64 label: LABEL_OPTIONAL }
  field {
    name: "attr" number: 10 type: TYPE_MESSAGE type_name: ".ChakraProtoMsg.AttributeProto" label: LABEL_REPEATED
  }
}
"""
"""What is used of Chakra's ``et_def.proto``."""
_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
_MESSAGE = {
    name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
    for name in ("GlobalMetadata", "Node")
}
COMPUTE, SEND, RECEIVE, COLLECTIVE = range(4, 8)
ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = 2, 6, 7
_LINEAR = providers.names("linear")


class Read(NamedTuple):
    """A node as a reader sees it."""

    name: str
    kind: int
    follows: tuple[int, ...]
    micros: int
    attributes: dict[str, Any]


def read(path: Path) -> list[Read]:
    found = []
    with path.open("rb") as file:
        assert proto.parse_length_prefixed(_MESSAGE["GlobalMetadata"], file).version == "1.0.0"
        for number in count():
            node = proto.parse_length_prefixed(_MESSAGE["Node"], file)
            if node is None:
                return found
            assert node.id == number and not len(unknown_fields.UnknownFieldSet(node))
            attributes = {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}
            assert attributes.pop("is_cpu_op") is False
            found.append(Read(node.name, node.type, tuple(node.data_deps), node.duration_micros, attributes))


def timeline(name: str, size: int = 4) -> Timeline:
    of = model("linear-llama3-1b" if name in _LINEAR else "llama3-8b")
    shape, machine = Parallel(devices=size, context=size, seq_length=2**15), cluster("h100-1-per-node")
    setup = settled(providers.get(name), on(problem(of, shape), machine, 1), Options())
    return simulate(setup, setup.problem, cluster=machine, ranks="all")


@pytest.mark.parametrize("name", [*providers.names(), *_LINEAR])
def test_every_rank_sends_its_ledger_to_ranks_that_expect_it(name: str, tmp_path: Path) -> None:
    made = timeline(name)
    chakra.write(tmp_path, made)
    groups = json.loads((tmp_path / "groups.json").read_text())
    for phase in ("forward", "backward"):
        traces = [read(tmp_path / f"{phase}.{rank}.et") for rank in range(4)]
        messages: dict[int, dict[tuple[int, int, int], list[int]]] = {k: defaultdict(list) for k in (SEND, RECEIVE)}
        tagged: dict[str, set[int]] = defaultdict(set)
        called: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for rank, trace in enumerate(traces):
            sent = 0
            for number, node in enumerate(trace):
                assert all(follows < number for follows in node.follows)
                a = node.attributes
                if node.kind in (SEND, RECEIVE):
                    assert a["comm_src" if node.kind == SEND else "comm_dst"] == rank
                    tagged[node.name].add(a["comm_tag"])
                    messages[node.kind][a["comm_src"], a["comm_dst"], a["comm_tag"]].append(a["comm_size"])
                    sent += a["comm_size"] if node.kind == SEND else 0
                elif node.kind == COLLECTIVE:
                    called[a["pg_name"]][rank].append((a["comm_type"], a["comm_size"]))
                    n = len(groups[a["pg_name"]])
                    each = a["comm_size"] if a["comm_type"] == ALL_GATHER else a["comm_size"] // n
                    sent += (n - 1) * each
            ledger = {axis: n for (at, axis), n in made.sent(rank).items() if at == phase}
            assert sent == sum(ledger.values()), (phase, rank)
            program = getattr(made.programs[rank], phase)
            seconds = sum(kernel_time.seconds(event, made.cluster.device) for event in program)
            assert sum(node.micros for node in trace) == round(seconds * 1e6)
        assert messages[SEND] == messages[RECEIVE], "in their order, from the same rank, with the same bytes"
        assert len(set.union(set(), *tagged.values())) == len(tagged), "each stream has a tag of its own"
        for group, by_rank in called.items():
            assert sorted(by_rank) == groups[group]
            assert len({tuple(calls) for calls in by_rank.values()}) == 1, "a collective is one of all its ranks"


def test_kernels_follow_what_was_waited_for_and_messages_what_was_computed() -> None:
    merge, product = Memory(2**20, 1), Products(2**40, 1, "bfloat16")
    first, second = (Post(n, "exchange", "cp", "cp", 8, 1, 1, 3) for n in range(2))
    events = (product, first, merge, second, Wait(0), product, product, Wait(1), merge)
    nodes = list(chakra.Trace(timeline("ring"), 0).nodes(events))
    assert [(node.kind, node.follows) for node in nodes] == [
        (COMPUTE, ()),
        (SEND, (0,)),
        (RECEIVE, (0,)),
        (COMPUTE, (0,)),
        (SEND, (1, 2, 3)),  # the message before it in its stream, and what was computed
        (RECEIVE, (1, 2, 3)),
        (COMPUTE, (1, 2, 3)),
        (COMPUTE, (6,)),
        (COMPUTE, (4, 5, 7)),
    ]


def test_tensor_parallel_devices_have_groups_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    asked = ["explain", "--model", "llama3-8b", "--cluster", "dgx-h100", "--seq-length", "65536"]
    sizes = ["--devices", "8", "--tensor", "2", "--provider", "attention2d", "--grid", "2x2"]
    done = CliRunner().invoke(app, [*asked, *sizes, "--chakra", str(folder)])
    assert done.exit_code == 0 and f"wrote {folder}/forward.*.et" in done.output, done.output
    groups = json.loads((folder / "groups.json").read_text())
    assert sorted(groups.values()) == [[0, 2], [0, 4], [1, 3], [1, 5], [2, 6], [3, 7], [4, 6], [5, 7]]
    for device in range(8):
        called = {n.attributes["pg_name"] for n in read(folder / f"forward.{device}.et") if n.kind == COLLECTIVE}
        assert called and all(device in groups[group] for group in called)


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    asked = ["explain", "--model", "llama3-8b", "--cluster", "dgx-h100", "--chakra", str(path)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2 and f"--chakra {path}: cannot create this folder" in done.output
    assert done.output.count("\n") == 1
