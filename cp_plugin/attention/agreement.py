"""Do all ranks make the same call? Settings are compared as digests in the first calls, and rarely after.

Ranks that disagree would not fail, but train on something else: rows of their own, another mask, another length. In a
comparison 8 bytes per setting and rank go around, and the host waits for the device once; between comparisons a call
costs nothing. With options that were resolved elsewhere nothing is compared: Megatron's start-up has done so.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cp_plugin.comm import GroupMesh, Ledger, Mesh, ThreadMesh, device_of
from cp_plugin.comm.every_rank import of_every_rank
from cp_plugin.common.text import ranks_named

FIRST, EVERY = 4, 256
"""Calls that are compared: so many at first, and every so many."""


class Calls:
    """Counts calls; every rank's counter goes the same way."""

    def __init__(self, *, compared: bool = True) -> None:
        self.number = 0
        self._compared = compared
        self.ledger = Ledger()
        """What the comparisons have sent, apart from what attention sends."""

    def is_compared(self) -> bool:
        """Whether this call is; counts it."""
        self.number += 1
        return self._compared and (self.number <= FIRST or self.number % EVERY == 0)


def check(mesh: Mesh, calls: Calls, settings: Callable[[], Mapping[str, Any]]) -> None:
    """Compare the settings of a call over all ranks, if it is its turn. Collective then.

    Args:
        settings: name -> a 0-dim int64 tensor, or any value whose ``repr`` tells it from others.

    Raises:
        ValueError: on every rank, naming each setting that differs, and the ranks on which it does.
    """
    if mesh.size == 1 or not isinstance(mesh, GroupMesh | ThreadMesh) or not calls.is_compared():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    named = settings()
    device = next((x.device for x in named.values() if isinstance(x, Tensor)), torch.device("cpu"))
    device = _device(mesh, device)
    digests = torch.stack([_digest(x, device) for x in named.values()])
    table = gathered(mesh, digests[None], calls.ledger).tolist()
    problems = []
    for column, name in enumerate(named):
        ranks_of: dict[int, list[int]] = {}
        for rank, row in enumerate(table):
            ranks_of.setdefault(row[column], []).append(rank)
        if len(ranks_of) > 1:
            groups = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))
            problems.append(f"{name} ({' and '.join(ranks_named(ranks) for ranks in groups)} disagree)")
    if problems:
        mine = {name: x for name, x in named.items() if any(p.startswith(f"{name} (") for p in problems)}
        shown = ", ".join(f"{name}={_shown(x)}" for name, x in mine.items())
        raise ValueError(
            f"context-parallel ranks made different calls: {'; '.join(problems)}. Every rank must pass its shard of "
            f"the same batch, with the same settings. Rank {mesh.index} has {shown}"
        )


def of_call(cp: Any, name: str, tensors: Sequence[Tensor | None], **settings: Any) -> None:
    """``check`` for a call of a ``ContextParallel``: its settings, and its tensors' shapes and dtypes."""

    def named() -> dict[str, Any]:
        gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        return {
            "call": name,
            "shapes": [None if x is None else (*x.shape, x.dtype) for x in tensors],
            "gradients": gradients,
            "provider": cp.provider.name,
            "layout": cp.layout.name,
            **settings,
        }

    check(cp.mesh, cp._calls, named)


def gathered(mesh: Mesh, x: Tensor, ledger: Ledger | None = None) -> Tensor:
    """``[n, ...]`` of every rank, in rank order: ``[size * n, ...]``; recorded in a ledger of its own."""
    device, usual = x.device, mesh.ledger
    mesh.ledger = Ledger() if ledger is None else ledger
    try:
        return of_every_rank(mesh, x.to(_device(mesh, device))).flatten(0, 1).to(device)
    finally:
        mesh.ledger = usual


def _device(mesh: Mesh, device: torch.device) -> torch.device:
    """Where a small message can travel from."""
    if device.type == "cpu" and isinstance(mesh, GroupMesh):
        group = next((group for group in mesh.groups.values() if group is not None), None)
        return torch.device("cpu") if group is None else torch.device(device_of(group))
    return device


def _digest(x: Any, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach().to(device=device, dtype=torch.int64).reshape(())
    text = repr(x).encode()
    return torch.tensor(zlib.crc32(text) << 31 | zlib.crc32(text[::-1]), dtype=torch.int64, device=device)


def _shown(x: Any) -> str:
    text = str(x.item()) if isinstance(x, Tensor) else repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
