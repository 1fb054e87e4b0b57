"""Results of ``cp-plugin traffic`` and ``cp-plugin verify``, as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.testing.traffic import EQUAL, Row
from cp_plugin.testing.verify import Result
from cp_plugin.tools.flags import replace_megatron_flags
from cp_plugin.tools.output import Cells, print_lines, print_table


def print_traffic(console: Console, problem: Problem, rows: Sequence[Row]) -> None:
    """Print a row per setup."""
    columns = ("provider", "chosen", "forward", "backward", "total", "of ring's bytes", "note")
    lines: list[tuple[Cells, str]] = []
    for row in rows:
        first = (row.setup.provider.name, settings(row.setup) if problem.bounds else str(row.setup))
        if row.setup.reason is not None:
            lines.append(((*first, f"cannot: {replace_megatron_flags(row.setup.reason)}"), "dim"))
            continue
        differs = row.measured not in ("", EQUAL)
        total = show_bytes(row.most) + (f" (least {show_bytes(row.least)})" if row.least < row.most else "")
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}x"
        sent = (_join_axes(row.busiest, "forward"), _join_axes(row.busiest, "backward"))
        note = f"DIFFERS: {row.measured}" if differs else row.measured
        lines.append(((*first, *sent, total, ratio, note), "red" if differs else ""))
    print_table(console, f"Bytes sent by the busiest rank, {describe(problem)}", columns, lines)


def print_why(console: Console, setups: Sequence[Setup]) -> None:
    """The automatic choices with reasons, a line each; once where several setups share it."""
    lines = [f"{setup.provider.name}: {replace_megatron_flags(text)}" for setup in setups for text in setup.why]
    print_lines(console, *dict.fromkeys(lines))


def print_verified(console: Console, title: str, planned: Sequence[Setup], results: Sequence[Result]) -> None:
    """A row per setup: its result, or why it cannot run; of decoding also the busiest rank's bytes per token."""
    columns = ("provider", "chosen", "mask", "heads", "dtype", "sent per token", "worst error", "limit", "result")
    print_table(console, title, columns, [_verdict(*pair) for pair in _paired(planned, results)])


def _paired(planned: Sequence[Setup], results: Sequence[Result]) -> Iterator[tuple[Setup, Result | None]]:
    """Each setup with its result; None: it cannot run."""
    remaining = iter(results)
    return ((setup, next(remaining) if setup.reason is None else None) for setup in planned)


def _verdict(setup: Setup, result: Result | None) -> tuple[Cells, str]:
    problem = setup.problem
    sent = show_bytes(max(result.sent)) if result is not None and result.sent else ""
    case = (_mask(problem), f"{problem.heads}:{problem.kv_heads}", dtype_name(problem.dtype))
    first = (setup.provider.name, settings(setup), *case, sent)
    if result is None:
        return (*first, f"cannot: {replace_megatron_flags(setup.reason or '')}"), "dim"
    if result.failure:
        return (*first, f"FAIL: {result.failure}"), "red"
    error, limit = result.errors[result.worst], result.limits[result.worst]
    verdict = "PASS" if result.ok else "FAIL"
    return (*first, f"{result.worst} {error:.1e}", f"{limit:.1e}", verdict), "" if result.ok else "red"


def traffic_as_json(problem: Problem, rows: Sequence[Row]) -> dict[str, Any]:
    """Return all bytes; ``by_axis``: of the busiest rank."""
    entries = []
    for row in rows:
        entry = _setup_as_json(row.setup)
        if row.ranks:
            phases = sorted({phase for phase, _ in row.busiest}, reverse=True)
            entry["by_axis"] = {p: {a: n for (q, a), n in row.busiest.items() if q == p} for p in phases}
            entry |= {"most": row.most, "least": row.least, "over_ring": row.ratio}
            entry |= {"measured": row.measured} if row.measured else {}
        entries.append(entry)
    return {"problem": problem_as_json(problem), "rows": entries}


def verified_as_json(planned: Sequence[Setup], results: Sequence[Result]) -> dict[str, Any]:
    """Errors and limits of all tensors; of decoding also the bytes that each rank sends per token."""
    entries = []
    for setup, result in _paired(planned, results):
        entry = {**_setup_as_json(setup), "problem": problem_as_json(setup.problem)}
        if result is not None:
            entry |= {"errors": dict(result.errors), "limits": dict(result.limits), "ok": result.ok}
            entry |= {"failure": result.failure} if result.failure else {}
            entry |= {"sent_per_token": list(result.sent)} if result.sent else {}
        entries.append(entry)
    return {"ok": bool(results) and all(result.ok for result in results), "results": entries}


def _join_axes(sent: Formula, phase: str) -> str:
    return ", ".join(f"{axis} {show_bytes(n)}" for (p, axis), n in sent.items() if p == phase)


def settings(setup: Setup) -> str:
    """``zigzag, grid 8x8, head parallel 2``."""
    return ", ".join(filter(None, (setup.layout, str(setup))))


def describe(problem: Problem) -> str:
    """Show ranks, tokens, heads, dtype and mask."""
    sizes = " and ".join(map(str, dict.fromkeys((problem.head_dim, problem.v_head_dim))))
    return (
        f"{problem.size} ranks, {problem.seq_length} tokens, batch {problem.batch}, heads {problem.heads}:"
        f"{problem.kv_heads} of {sizes}, {dtype_name(problem.dtype)}, {_mask(problem)}"
    )


def _mask(problem: Problem) -> str:
    decay = "" if problem.decay == "none" else f", {problem.decay} decay"
    decay += ", delta rule" if problem.delta else ""
    window = "" if problem.window is None else f", window {max(problem.window)}"
    documents = f", {len(problem.bounds) - 1} documents" if problem.bounds else ""
    return f"{'causal' if problem.causal else 'full'}{decay}{window}{documents}"


def _setup_as_json(setup: Setup) -> dict[str, Any]:
    return {
        "provider": setup.provider.name,
        "layout": setup.layout,
        "chosen": setup.options.chosen,
        "why": [replace_megatron_flags(text) for text in setup.why],
        "cannot": replace_megatron_flags(setup.reason) if setup.reason is not None else None,
    }


def problem_as_json(problem: Problem) -> dict[str, Any]:
    """Return all fields except a custom placement."""
    fields = asdict(replace(problem, placed=None))
    return {name: value for name, value in fields.items() if name != "placed"} | {"dtype": dtype_name(problem.dtype)}
