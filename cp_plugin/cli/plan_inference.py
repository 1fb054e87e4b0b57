"""``cp-plugin plan --prefill --decode``: what it takes to answer, instead of to train."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rich.console import Console

from cp_plugin.cli.show_inference import as_json, print_answer
from cp_plugin.planner.asked import FromFlags
from cp_plugin.planner.hardware import Cluster, override
from cp_plugin.planner.inference import Asked
from cp_plugin.planner.inference_search import Answer, answer, shape
from cp_plugin.planner.model import model
from cp_plugin.planner.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Flags of ``cp-plugin plan`` that mean something here."""

    prefill: bool
    decode: bool
    model: str | None
    megatron: list[str]
    """A training's own flags; empty: ``model`` is a name."""
    devices: int | None
    seq_length: int
    tensor: int | None
    context: int | None
    batch: int
    chunk: int
    fp8: bool
    limit: float | None
    """Bytes of a device; None: all."""


def refuse(given: dict[str, object]) -> None:
    """ValueError for flags of a training: flag -> what was given, None where it was not."""
    for flag, value in given.items():
        if value not in (None, False, []):
            shown = f" {value}" if isinstance(value, str | int) and not isinstance(value, bool) else ""
            raise ValueError(f"{flag}{shown} is for a training, and --prefill and --decode are not: leave it out")


def found(asked: Question, machine: Cluster, from_flags: FromFlags, changes: dict[str, int]) -> Answer:
    """The answer.

    Raises:
        ValueError: for sizes that do not fit the model, the machine or its memory; the message names the flag.
    """
    machine = override(machine, **changes) if changes else machine
    needs = (asked.tensor or 1) * (asked.context or 1)
    devices = asked.devices or max(needs, machine.per_node)
    base = Parallel(micro_batch=asked.batch, seq_length=asked.seq_length)
    tensor, context = asked.tensor, asked.context
    if asked.megatron:
        its, given = from_flags(asked.megatron, devices)
        if given.pipeline > 1:
            raise ValueError(
                f"--pipeline-model-parallel-size {given.pipeline}: a model answers on one pipeline stage: write 1"
            )
        tensor, context = given.tensor, given.context
        devices = tensor * context
        base = replace(base, dtype=given.dtype, seq_length=given.seq_length, vocab_multiple=given.vocab_multiple)
    else:
        its = model(str(asked.model))
    limit = machine.device.memory_bytes if asked.limit is None else asked.limit
    chosen = shape(its, machine, devices, base, tensor=tensor, context=context, limit=limit, fp8=asked.fp8)
    question = Asked(model=its, cluster=machine, parallel=chosen, chunk=asked.chunk, fp8=asked.fp8)
    return answer(question, limit=limit, prefills=asked.prefill, decodes=asked.decode)


def show(answered: Answer, *, in_json: bool) -> None:
    """On the terminal."""
    if in_json:
        print(json.dumps(as_json(answered), indent=2))
    else:
        print_answer(Console(), answered)
