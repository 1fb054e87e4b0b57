"""Tables of the page on kernels: the order of ``auto``, the calls methods make, and the memory they need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import markdown_tables as markdown
import torch

from cp_plugin import Options, Problem
from cp_plugin.attention.setups import settled
from cp_plugin.attention.traced_blocks import asked_of
from cp_plugin.common.text import in_bytes
from cp_plugin.core.problem import CallInfo
from cp_plugin.kernels import backends
from cp_plugin.kernels.backends import devices, flash, te
from cp_plugin.kernels.backends.flash_libraries import Library
from cp_plugin.kernels.blocks import LONG
from cp_plugin.kernels.cost import MOST, Cost, cost, speeds_on
from cp_plugin.methods import registry as providers
from cp_plugin.planner.trace.memory import peaks

SIZES = {"size": 8, "heads": 32, "kv_heads": 8, "head_dim": 128}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window of 4,096": {"window": (4095, 0)},
    "4 documents": {"bounds": (0, 3000, 20000, 41000, 65536)},
}


class Call(NamedTuple):
    """Tensors of an attention call."""

    head_dim: int = 128
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    varies: bool = False
    """Whether each call has tiles of other shapes."""


CALLS = {
    "heads of 64 to 128": Call(),
    "heads of 192 and 128 (MLA)": Call(192),
    "heads of 256": Call(256, 256),
    "heads of 60": Call(60, 60),
    "float32": Call(dtype=torch.float32),
    "deterministic": Call(deterministic=True),
    "packs; lengths that vary": Call(varies=True),
}
"""In bfloat16 unless they say otherwise."""
CUDA = torch.device("cuda")
_HOSTS = tuple(f"node{rank // 8}" for rank in range(64))


def order_table() -> str:
    """What ``auto`` tries on each family of GPUs, with the rates that order it."""
    rows: list[tuple[object, ...]] = []
    shown: set[object] = set()
    for family in devices.FAMILIES[1:]:
        rows.append((f"{family.title}, from {'.'.join(map(str, family.since))}", "", "", "", family.order_source))
        if family.order in shown:
            continue
        shown.add(family.order)
        tried = [(number, f"`{c.title}`", c.rate, c.source) for number, c in enumerate(family.order, start=1)]
        own = [("", "ours (target)", family.scale.own, family.scale.source)] if family.scale is not None else []
        for number, title, rate, source in (*tried, *own):
            if rate is not None:
                rows.append(("", number, title, f"{rate.forward:g} / {rate.backward:g}", source))
    return markdown.table(("GPU", "order", "kernel", "TFLOP/s, forward / backward", "source"), rows)


def calls_table() -> str:
    """Who computes the blocks of a forward on a middle rank of 8 on Hopper, by provider and mask, in two layouts."""
    columns = [("causal", 512), *((mask, 8192) for mask in MASKS)]
    rows = []
    for name in providers.names():
        for layout in dict.fromkeys((providers.get(name).layouts[0], "striped")):
            if layout not in providers.get(name).layouts:
                continue
            rows.append((f"`{name}`", layout, *(_in_words(costs(name, layout, n, mask)) for mask, n in columns)))
    return markdown.table(("provider", "layout", *(f"{mask}, {n:,} tokens" for mask, n in columns)), rows)


def costs(name: str, layout: str, tokens: int, mask: str) -> list[Cost]:
    """Of the blocks of a forward that have tiles, on rank 5 of 8, on an H100 with flash-attn 3."""
    speeds = speeds_on(devices.family((9, 0)), "flash", 3)
    problem = Problem(**SIZES, seq_length=8 * tokens, **MASKS[mask])
    found = (cost(*a.block.area, a.sizes, speeds, LONG) for a in asked_of(name, problem, options(name, layout), 5))
    return [each for each in found if each.tiles != 0]


def options(name: str, layout: str) -> Options:
    """All heads at once."""
    return Options(layout=layout, head_groups=1 if "head_groups" in providers.get(name).options else None)


def _in_words(found: list[Cost]) -> str:
    library, ours = [c for c in found if c.by_library], [c.tiles for c in found if not c.by_library]
    calls = sum(c.tiles or 0 for c in library)
    parts = [f"{calls} call{'s' * (calls > 1)}"] if library else []
    if ours:
        tiles = sorted({math.inf if n is None else n for n in ours})
        ends = [f"over {MOST}" if n == math.inf else f"{n}" for n in (tiles[0], tiles[-1])]
        parts.append(f"**ours**, {'-'.join(dict.fromkeys(ends))} tiles")
    return "; ".join(parts)


def taken_table() -> str:
    """Which candidates of ``auto`` take which tensors, and why the others do not."""
    rows = []
    for capability, (title, call) in product(((8, 0), (9, 0), (10, 0)), CALLS.items()):
        refused = refusals(capability, call)
        takers = ", ".join(f"`{name}`{'*' * (name == 'te')}" for name, reason in refused.items() if reason is None)
        others = "; ".join(f"`{name}`: {_shortened(reason)}" for name, reason in refused.items() if reason is not None)
        rows.append((f"{capability[0]}.{capability[1]}", title, takers, others))
    return markdown.table(("GPU", "tensors", "kernels that take them, best first", "others, and why not"), rows)


def _shortened(reason: str) -> str:
    """What of a call a kernel refuses, of its message."""
    about = {"head sizes": "head size", "bfloat16": "dtype", "determin": "not deterministic", "plan": "builds plans"}
    return next(word for part, word in about.items() if part in reason)


def refusals(capability: tuple[int, int], call: Call) -> dict[str, str | None]:
    """Candidate of ``auto``, in its order -> why it does not take such tensors, if all libraries are installed."""
    info, found = CallInfo(CUDA, call.dtype, call.head_dim, call.v_head_dim), {}
    with everything_installed(capability, call.deterministic):
        for title, backend in backends.candidates(CUDA)[1]:
            plans = call.varies and backend.name in devices.PLANS_EACH_SHAPE
            found[title] = backend.unsupported(info) or (backends.A_PLAN_EACH if plans else None)
        chosen, _ = backends.choose("auto", info, plans=not call.varies)
    first = next(title for title, reason in found.items() if reason is None)
    assert first.partition(" ")[0] == chosen.name, "the table is not what auto does"
    del found["reference"]
    return found


@contextmanager
def everything_installed(capability: tuple[int, int], deterministic: bool) -> Iterator[None]:
    """A GPU, cuDNN 9.20, flash-attn 2, 3 and 4, and a Transformer Engine that refuses nothing."""
    libraries = {
        n: lambda n=n: Library(generation=n, title=f"flash-attn {n}", forward=print, backward=print, two_sizes=n > 2)
        for n in (4, 3, 2)
    }
    before = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.backends.cudnn, "is_available", lambda: True),
            (torch.backends.cudnn, "version", lambda: 92000),
            (flash, "LOAD", libraries),
            (te, "_refusal", lambda *asked: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        flash._chosen.cache_clear()
        stack.callback(flash._chosen.cache_clear)
        torch.use_deterministic_algorithms(deterministic)
        stack.callback(torch.use_deterministic_algorithms, before)
        yield


def memory_table() -> str:
    """What one attention call allocates beyond its inputs on 8 and 64 ranks, by provider."""
    problems = [Problem(size=n, heads=64, kv_heads=64, head_dim=128, seq_length=2**20) for n in (8, 64)]
    rows = []
    for name in providers.names():
        cells = []
        for problem in problems:
            try:
                found = peaks(name, problem, Options(), index=problem.size - 1)
                cells += [in_bytes(found.forward), in_bytes(found.backward)]
            except ValueError:
                cells += ["cannot", "cannot"]
        own = settled(providers.get(name), replace(problems[-1], hosts=_HOSTS), Options())
        rows.append((f"`{name}`", *cells, own.communicators))
    titles = ("provider", "8 ranks: forward", "backward", "64 ranks: forward", "backward", "communicators")
    return markdown.table(titles, rows)
