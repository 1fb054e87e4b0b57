"""The rule of ``lazy.py`` for threads: the first message along an axis needs all ranks along it.

``ThreadMesh`` has no communicators. Here the first message along an axis waits for a message, of any verb, of each rank
of the axis, and fails without one. The whole mesh is exempt: methods exchange between some of its ranks only, so its
group is connected where it is made (``cp_plugin.comm.connect``), like all groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from strict.lazy import MissingRanksError

from cp_plugin.comm import WHOLE, ThreadMesh
from cp_plugin.common.text import ranks_named

PATIENCE = 20.0
"""Seconds, at most: a mesh may have less."""

connected = {WHOLE}
"""Axes whose groups count as used."""


def switch_on() -> None:
    """For all thread meshes of this process and those forked from it."""
    for name in ("_exchange", "_share"):
        call = getattr(ThreadMesh, name)
        if not hasattr(call, "__wrapped__"):
            setattr(ThreadMesh, name, _meeting(call))


def _meeting(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def meet_and_call(mesh: ThreadMesh, axis: str, *args: Any) -> Any:
        if axis not in connected:
            _meet(mesh, axis, args[0] if call.__name__ == "_share" else "exchange")
        return call(mesh, axis, *args)

    return meet_and_call


def _meet(mesh: ThreadMesh, axis: str, verb: str) -> None:
    hub = mesh._hub
    line = list(range(mesh.size)) if axis == WHOLE else mesh.row(axis, mesh.index)
    place = mesh._name, axis, line[0]
    came = vars(hub).setdefault("meetings", defaultdict(dict))[place]
    if mesh.index in came:
        return
    came[mesh.index] = verb
    if len(came) == len(line):
        hub.came(place)
        return
    patience = min(PATIENCE, hub.patience)
    hub.wait_for(place, patience)
    if len(came) == len(line) or hub.failure:
        return
    never = ranks_named([rank for rank in line if rank not in came])
    raise MissingRanksError(
        f"rank {mesh.index}: {verb} is the first use of axis {axis!r} (ranks {line}), by all of its ranks where a "
        f"communicator is made in it. After {patience:g} s these had come: "
        + ", ".join(f"{rank} ({verb})" for rank, verb in sorted(came.items()))
        + f"; these never did: {never}"
    )
