"""The result of ``cp-plugin plan --prefill --decode``, as a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from cp_plugin.cli.show_plan import chosen, over
from cp_plugin.cli.terminal import print_flags, print_lines, print_table
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.planner.candidates import as_flags
from cp_plugin.planner.errors import KNOWN_ERROR, legend
from cp_plugin.planner.serving.cost import LAUNCHES, Prefill
from cp_plugin.planner.serving.search import Answer

_COLUMNS = ("provider", "chosen", "prefill", "x best", "sends", "longest context")
_ALONE = "linear attention alone"
_COUNTED = (
    "prefill: attention is simulated, other layers as in a forward pass of training; decode: the session's work per "
    f"token, with weights read once and {LAUNCHES} launches per layer besides attention; host time is not included"
)


def print_answer(console: Console, found: Answer) -> None:
    """With ``--prefill`` a row per provider; then decode and memory."""
    title = f"{_asked(found)}: predicted"
    if found.prefills:
        first = found.prefills[0]
        rows = [(_cells(found, n), "bold" * (n == 0)) for n in range(len(found.prefills))]
        print_table(console, title, _COLUMNS, rows)
        print_lines(console, *(f"{name} cannot: {reason}" for name, reason in found.cannot.items()), style="dim")
        if first.setup is not None:
            console.print()
            print_flags(console, "flags:", as_flags(first.setup))
            console.print()
    else:
        print_lines(console, title)
    print_lines(console, *_lines(found))
    print_lines(console, _COUNTED, legend(_name(one) for one in found.prefills), style="dim")


def as_json(found: Answer) -> dict[str, Any]:
    """SI units."""
    asked, needs, decode = found.asked, found.memory, found.decode
    p = asked.parallel
    return {
        "model": asked.model.name,
        "cluster": asked.cluster.name,
        "device": asked.cluster.device.name,
        "devices": p.devices,
        "tensor": p.tensor,
        "context": p.context,
        "tokens": p.seq_length,
        "batch": p.micro_batch,
        "chunk": asked.chunk,
        "fp8_cache": asked.fp8,
        "prefill": [_prefill(found, one) for one in found.prefills],
        "decode": decode
        and {
            "seconds": decode.seconds,
            "parts": dict(decode.parts),
            "cache_read_s": decode.read,
            "tokens_per_s": decode.tokens_per_s,
            "sent": decode.sent,
        },
        "memory": {
            "limit": needs.limit,
            "parameters": needs.parameters,
            "states": needs.states,
            "cache": needs.cache,
            "cache_per_token": needs.per_token,
            "longest_context": needs.longest(found.asked.multiple),
        },
        "cannot": dict(found.cannot),
        "counted": _COUNTED,
        "error": KNOWN_ERROR,
    }


def _prefill(found: Answer, one: Prefill) -> dict[str, Any]:
    setup, p = one.setup, found.asked.parallel
    return {
        "provider": setup and setup.provider.name,
        "layout": setup and setup.layout,
        "chosen": setup.options.chosen if setup else {},
        "flags": as_flags(setup) if setup else "",
        "seconds": one.seconds,
        "parts": dict(one.parts),
        "tokens_per_s": p.micro_batch * p.seq_length / one.seconds,
        "sent": one.sent,
        "longest_context": found.memory.longest(found.asked.multiple, one.working),
    }


def _asked(found: Answer) -> str:
    asked, p = found.asked, found.asked.parallel
    parts = "" if asked.chunks == 1 else f" in chunks of {asked.chunk:,}"
    sizes = f"tensor {p.tensor} x context {p.context}" if p.tensor > 1 else f"context {p.context}"
    return (
        f"{asked.model.name}, {p.seq_length:,} tokens{parts}, batch {p.micro_batch}, {p.devices} x "
        f"{asked.cluster.device.name} ({asked.cluster.name}), {sizes}"
    )


def _cells(found: Answer, number: int) -> tuple[str, ...]:
    one = found.prefills[number]
    return (
        _name(one),
        chosen(one.setup) if one.setup else "",
        in_seconds(one.seconds),
        over(one.seconds, found.fastest, number, found.tied),
        in_bytes(one.sent),
        _length(found.memory.longest(found.asked.multiple, one.working)),
    )


def _name(one: Prefill) -> str:
    return one.setup.provider.name if one.setup else _ALONE


def _lines(found: Answer) -> Iterator[str]:
    one, needs, p = found.decode, found.memory, found.asked.parallel
    if found.prefills:
        first = found.prefills[0]
        yield (
            f"prefill: {p.micro_batch * p.seq_length / first.seconds:,.0f} tokens/s over all prompts, attention "
            f"{first.parts['attention'] / first.seconds:.0%} of the time"
        )
    if one is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {in_seconds(s)}" for name, s in one.parts.items() if s)
        yield (
            f"decode, with any provider: {in_seconds(one.seconds)} per token, {one.tokens_per_s:,.3g} tokens/s over "
            f"all sequences: {parts}"
        )
        yield (
            f"a rank sends {in_bytes(one.sent)} per token, whatever the context length; just reading its cache takes "
            f"{in_seconds(one.read)}"
        )
    yield (
        f"a device holds {in_bytes(needs.parameters)} of parameters and {in_bytes(needs.cache)} of cache"
        + (f", {in_bytes(needs.states)} of states" if needs.states else "")
        + f"; with nothing else in its {in_bytes(needs.limit)}, the longest context is "
        + _length(needs.longest(found.asked.multiple))
    )


def _length(tokens: int | None) -> str:
    return "any" if tokens is None else f"{tokens:,}"
