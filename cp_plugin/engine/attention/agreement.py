"""Do all ranks make the same call? Settings are compared as digests in the first calls, and ever more rarely after.

Ranks that disagree would not fail, but train on something else: rows of their own, another mask, another length. In a
comparison 8 bytes per setting and rank go around, and the host waits for the device once; it covers all calls since the
last one, so that a call of its own on one rank is found even where the next ones agree. A rank that changes at call
n > 4 is found by call 2n, and by call n + 256. With options that were resolved elsewhere nothing is compared:
Megatron's start-up has done so.

More often would cost every call: NCCL delivers a digest to the device, where the host must wait to read it, and the
run's store would get a request of every rank in every layer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.comm import GroupMesh, Ledger, Mesh, ThreadMesh, device_of
from cp_plugin.engine.comm.every_rank import gather_ranks, gather_texts
from cp_plugin.engine.common.text import group_ranks, ranks_named
from cp_plugin.engine.placement.documents import Placement

FIRST, EVERY = 4, 256
"""Calls that are compared: so many at first, then those whose number is a power of two, and every so many."""


_TEXT = 400
"""Bytes of an error that other ranks are told."""


class Changes(list[tuple[int, Any]]):
    """Values of a setting since the last comparison, each with the number of the first call that had it."""


class Calls:
    """Counts calls; every rank's counter goes the same way."""

    def __init__(self, *, compared: bool = True) -> None:
        self.number = 0
        self.compared = compared
        self._since: dict[str, Changes] = {}
        self.ledger = Ledger()
        """What the comparisons have sent, apart from what attention sends."""

    def is_next_compared(self) -> bool:
        """Return True if the next call is."""
        number = self.number + 1
        return self.compared and (number <= FIRST or number & (number - 1) == 0 or number % EVERY == 0)

    def is_compared(self) -> bool:
        """Return True if this call is compared; count it."""
        compared = self.is_next_compared()
        self.number += 1
        return compared

    def note(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings of the next call until it is its turn to be compared."""
        for name, value in settings.items():
            changes = self._since.setdefault(name, Changes())
            if not changes or changes[-1][1] != value:
                changes.append((self.number + 1, value))

    def noted(self) -> dict[str, Changes]:
        """The settings kept since the last comparison, which are forgotten."""
        settings, self._since = self._since, {}
        return settings


def check(
    mesh: Mesh, calls: Calls, settings: Callable[[], Mapping[str, Any]], refused: Exception | None = None
) -> None:
    """Compare the settings of a call over all ranks, if it is its turn. Collective then.

    Args:
        settings: name -> a 0-dim int64 tensor, or any value whose ``repr`` tells it from others.
        refused: why this rank cannot make the call, for which the others would wait.

    Raises:
        ValueError: on every rank, naming each setting that differs, and the ranks on which it does, or with the error
            of a rank that cannot make the call. That rank itself raises ``refused``, compared or not.
    """
    if not _has_others(mesh) or not calls.is_compared() or _capturing():
        if refused is not None:
            raise refused
        return
    named = {**settings(), _REFUSED: refused and str(refused)}
    device = next((x.device for x in named.values() if isinstance(x, Tensor)), torch.device("cpu"))
    device = _device(mesh, device)
    digests = torch.stack([_digest(x, device) for x in named.values()])
    table = gathered(mesh, digests[None], calls.ledger).tolist()
    differ = _different(dict(zip(named, zip(*table, strict=True), strict=True)))
    theirs = problem_of_ranks(mesh, named[_REFUSED], device) if _REFUSED in differ else None
    if error := refused or theirs or _disagreement(differ, named, mesh.index):
        raise error


def _settings_in_block() -> Generator[dict[str, Any], None, tuple[dict[str, Any], Exception | None]]:
    """Yield a dictionary to a ``with`` block; return what the block has put there, and the error that ended it."""
    settings: dict[str, Any] = {}
    try:
        yield settings
    except Exception as error:
        return settings, error
    return settings, None


@contextmanager
def compare_call(cp: Any, name: str, tensors: Sequence[Tensor | None]) -> Iterator[dict[str, Any]]:
    """Inside the ``with`` block settings of a call of a ``ContextParallel`` are checked, and added to the dictionary,
    which is compared with the tensors' shapes and dtypes; an error in there reaches all ranks."""
    settings, refused = yield from _settings_in_block()
    if cp._calls.compared and _has_others(cp.mesh):
        gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        assert settings.keys() <= _SETTINGS.keys(), "a setting that other calls do not send a digest of"
        place = cp.layout.place
        cp._calls.note(
            {
                "call": name,
                "shapes": [None if x is None else (*x.shape, x.dtype) for x in tensors],
                "gradients": gradients,
                "provider": cp.provider.name,
                "layout": cp.layout.name,
                "placed documents": place if isinstance(place, Placement) else None,
                "options": cp.options.items,
                **_SETTINGS,
                **settings,
            }
        )
    check(cp.mesh, cp._calls, cp._calls.noted, refused)


@contextmanager
def compare_in_group(group: dist.ProcessGroup | None) -> Iterator[dict[str, Any]]:
    """``compare_call`` for what all ranks of a group are about to make together, such as several groups."""
    settings, refused = yield from _settings_in_block()
    if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
        text = json.dumps([str(refused or ""), {name: repr(x) for name, x in settings.items()}])
        texts, named = zip(*map(json.loads, gather_texts(text, group)), strict=True)
        differ = {} if any(texts) else _different({name: [x[name] for x in named] for name in settings})
        refused = refused or _first(texts) or _disagreement(differ, settings, group.rank())
    if refused is not None:
        raise refused


_REFUSED = "a refused call"


def _different(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
    """Return which ranks agree, the most first, of each setting on which some differ: name -> groups of ranks."""
    groups = {name: [*group_ranks(values).values()] for name, values in columns.items()}
    return {name: sorted(of, key=lambda ranks: (-len(ranks), ranks)) for name, of in groups.items() if len(of) > 1}


def _disagreement(differ: Mapping[str, list[list[int]]], named: Mapping[str, Any], index: int) -> ValueError | None:
    if not differ:
        return None
    parts = (f"{name} ({' and '.join(map(ranks_named, groups))} disagree)" for name, groups in differ.items())
    own = ", ".join(f"{name}={_shown(named[name])}" for name in differ)
    return ValueError(
        f"context-parallel ranks made different calls: {'; '.join(parts)}. Every rank must make the same call with the "
        f"same settings, and its shard of the same batch. Rank {index} has {own}"
    )


_NAMES = ("causal", "scale", "softcap", "window", "documents", "tree", "dim", "tokens", "by")
_SETTINGS = dict.fromkeys(_NAMES) | {"documents": ()}
"""Of every call, so that ranks that make different ones send as many digests."""


def may_wait(cp: Any) -> bool:
    """Return True if the host may wait for the device, since the next call is compared."""
    return _has_others(cp.mesh) and cp._calls.is_next_compared() and not _capturing()


def _has_others(mesh: Mesh) -> bool:
    return mesh.size > 1 and isinstance(mesh, GroupMesh | ThreadMesh)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def gathered(mesh: Mesh, x: Tensor, ledger: Ledger | None = None) -> Tensor:
    """``[n, ...]`` of every rank, in rank order: ``[size * n, ...]``; recorded in a ledger of its own."""
    device, usual = x.device, mesh.ledger
    mesh.ledger = Ledger() if ledger is None else ledger
    try:
        return gather_ranks(mesh, x.to(_device(mesh, device))).flatten(0, 1).to(device)
    finally:
        mesh.ledger = usual


def problem_of_ranks(mesh: Mesh, own: str | None, device: torch.device) -> ValueError | None:
    """On every rank the error of the first that has one; ``own``: this rank's. None if none has. Collective."""
    text = (own or "").encode()[:_TEXT].ljust(_TEXT)
    table = gathered(mesh, torch.tensor([list(text)], dtype=torch.uint8, device=device)).tolist()
    return _first([bytes(row).decode(errors="ignore").strip() for row in table])


def _first(texts: Sequence[str]) -> ValueError | None:
    """The error of the first rank that has one; texts: of every rank, empty without."""
    failed = [rank for rank, text in enumerate(texts) if text]
    return ValueError(f"{ranks_named(failed)}: {texts[failed[0]]}") if failed else None


def _device(mesh: Mesh, device: torch.device) -> torch.device:
    """Return where a small message can travel from."""
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
    if isinstance(x, Changes):
        (_, first), *later = x
        return "".join([_shown(first), *(f", from call {number} on {_shown(value)}" for number, value in later[-3:])])
    text = str(x.item()) if isinstance(x, Tensor) else repr(x)
    return text if len(text) <= 80 else f"{text[:77]}..."
