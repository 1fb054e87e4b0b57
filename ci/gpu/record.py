"""Result file of one step of the check: JSON, written while the step runs so that a killed step keeps what it had.

{"step": "providers", "finished": true, "error": "", "seconds": 61.2, "commit": "...",
 "checks": [{"group": ..., "name": ..., "ok": true, "of": ["provider ring"], "detail": {...}}],
 "figures": [{"group": ..., "name": ..., "value": 0.81, "wanted": [">=", 0.75], "of": [...], "detail": {...}}],
 "not_run": [{"name": ..., "reason": ...}]}

``of`` names the kernels and providers (``cases.kernel``, ``cases.provider``) that a check needs, or a figure times. A
figure is withheld if a check of its own kernels and providers, and no others, is wrong. What could not run is neither
right nor wrong: a case says so with ``NotRun``, and ``refusal`` tells which exceptions of libraries mean the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from cp_plugin.testing.clock import take_turns

_WRITE_EVERY_S = 1.0
OUT_OF_TIME = "out of time: the cap of its step"
REFUSE = ("fla", "flash_attn", "flash_attn_interface", "flash_attn_3", "transformer_engine")
"""Libraries whose own Python code refuses a GPU, a version or a size by a RuntimeError."""
Found = tuple[bool | None, dict[str, Any]]
"""Whether a result is right (None: not run, for the ``reason`` in the detail), and a detail."""
Row = tuple[str, str, bool | None, dict[str, Any]]
"""Group, name, and what was found."""
Call = Callable[[], object]


class NotRun(Exception):
    """Raised by a case that cannot run here, with the reason."""


class Step(AbstractContextManager["Step"]):
    """One step of the check: ``with Step("providers") as step: ...``"""

    def __init__(self, name: str, arguments: list[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=f"the step {name!r} of ci/gpu/check.sh")
        parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the JSON file")
        parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
        parser.add_argument("--seconds", type=float, default=600.0, help="time after which nothing new starts")
        parser.add_argument("--began", type=float, help="when that time began, on this machine's monotonic clock")
        given = parser.parse_args(arguments)
        self.smoke: bool = given.smoke
        self.device = torch.device("cpu" if self.smoke else "cuda")
        self.devices = 0 if self.smoke else torch.cuda.device_count()
        """GPUs for ranks over process groups; 0: Gloo on the CPU."""
        self.library = "Gloo" if self.smoke else "NCCL"
        self.folder: Path = given.out
        self._seconds, self._written = given.seconds, -math.inf
        self._start: float = time.monotonic() if given.began is None else given.began
        self._lost = ""
        self._file = given.out / f"{name}.json"
        self._content: dict[str, Any] = {"step": name, "finished": False, "error": "", "seconds": 0.0, "now": ""}
        self._content |= {"commit": os.environ.get("COMMIT", ""), "checks": [], "figures": [], "not_run": []}
        given.out.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def left(self) -> float:
        """Seconds in which something new may start."""
        return self._seconds - (time.monotonic() - self._start)

    @property
    def late(self) -> bool:
        return self.left <= 0

    @property
    def _hindered(self) -> str:
        """Why nothing new starts, or "". After an error of the device nothing in this process can be right."""
        return self._lost or (OUT_OF_TIME if self.late else "")

    def note(self, **values: Any) -> None:
        """Add facts about the whole step."""
        self._content |= values
        self._write()

    def check(self, group: str, name: str, ok: bool, of: Sequence[str] = (), **detail: Any) -> None:
        """Record something that is right or wrong."""
        self._add("checks", {"group": group, "name": name, "ok": bool(ok), "of": list(of), "detail": detail})
        if not ok:
            print(f"WRONG  {group}: {name}: {detail}", flush=True)

    def figure(
        self,
        group: str,
        name: str,
        value: float,
        wanted: tuple[str, float] | None = None,
        of: Sequence[str] = (),
        **detail: Any,
    ) -> None:
        """Record a measured ratio and its target: (">=" or "<=", number)."""
        row = {"group": group, "name": name, "value": value, "wanted": wanted, "of": list(of), "detail": detail}
        self._add("figures", row)
        target = "" if wanted is None else f" (wanted {wanted[0]} {wanted[1]})"
        print(f"{group}: {name}: {value:.3f}{target}", flush=True)

    def not_run(self, name: str, reason: str) -> None:
        """Record something that could not be tested."""
        self._add("not_run", {"name": name, "reason": " ".join(reason.split())})

    def add(self, group: str, name: str, ok: bool | None, detail: dict[str, Any]) -> None:
        """Record a ``Row``."""
        if ok is None:
            self.not_run(f"{group}: {name}", detail["reason"])
        else:
            self.check(group, name, ok, **detail)

    def attempt(self, group: str, name: str, call: Callable[[], Found], of: Sequence[str] = ()) -> None:
        """Record what a call finds; it is wrong if it raises, unless that is a ``refusal``."""
        if reason := self._hindered:
            self.not_run(f"{group}: {name}", reason)
            return
        self.note(now=f"{group}: {name}")
        ok, detail = found_by(call)
        self.add(group, name, ok, {"of": of} | detail)
        if lost(detail):
            self._lost = f"the device was lost in {group}: {name}"

    def measure(self, name: str, call: Call) -> None:
        """Run a call that records its own figures; a failure does not prevent other measurements."""
        if reason := self._hindered:
            self.not_run(name, reason)
            return
        self.note(now=name)
        try:
            call()
        except Exception as error:  # of any library
            self.not_run(name, in_a_line(error))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._content["finished"] = error is None
        if error is not None:
            self._content["error"] = in_a_line(error)
            traceback.print_exception(error)
        self._write()
        wrong = sum(not check["ok"] for check in self._content["checks"])
        checks, figures = len(self._content["checks"]), len(self._content["figures"])
        print(f"{self._content['step']}: {checks} checks, {wrong} wrong; {figures} figures", flush=True)
        if error is not None or wrong:
            sys.exit(1)

    def _add(self, kind: str, row: dict[str, Any]) -> None:
        self._content[kind].append(row)
        if time.monotonic() - self._written > _WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        self._content["seconds"] = round(self._written - self._start, 1)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._content, indent=1, allow_nan=False))
        new.replace(self._file)


def found_by(call: Callable[[], Found]) -> Found:
    """The result of a call; an exception is wrong, unless it is a ``refusal``."""
    try:
        return call()
    except Exception as error:  # of any library, or of the compiler
        return stopped(error)


def stopped(error: BaseException) -> Found:
    """What an exception says of a case: that it could not run, or that it is wrong."""
    reason = refusal(error)
    return (False, {"failure": in_a_line(error)}) if reason is None else (None, {"reason": reason})


def lost(detail: dict[str, Any]) -> bool:
    """Whether a case ended with an error of the device, after which CUDA fails in every call of this process."""
    return any(text in detail.get("failure", "") for text in ("CUDA error", "Triton Error [CUDA]"))


def refusal(error: BaseException) -> str | None:
    """The reason, if an exception or a cause of it says that something cannot run on this machine."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, NotRun):
            return str(at)
        if isinstance(at, torch.OutOfMemoryError):
            return "this GPU has too little memory for it"
        missing = isinstance(at, ImportError) and (at.name or "").partition(".")[0] not in (
            "",
            "cp_plugin",
            "cp_kernels",
        )
        if missing or (type(at) in (RuntimeError, NotImplementedError) and _raised_in(at) in REFUSE):
            return in_a_line(at)
        at = at.__cause__
    return None


def _raised_in(error: BaseException) -> str:
    """The top-level package whose Python code raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").partition(".")[0] if frames else ""


def worst(errors: Mapping[str, float], limits: Mapping[str, float]) -> Found:
    """Whether all errors are within their limits, and the one closest to (or furthest beyond) its limit."""

    def finite(x: float) -> float | str:
        return x if math.isfinite(x) else str(x)  # JSON has no infinity and no NaN

    name = max(errors, key=lambda name: errors[name] / max(limits[name], 1e-30))
    detail = {"tensor": name, "error": finite(errors[name]), "limit": finite(limits[name])}
    return all(errors[name] <= limits[name] for name in errors), detail


def in_a_line(error: BaseException) -> str:
    """An exception and its causes, abbreviated."""
    found, at = [], error
    while at is not None and len(found) < 3:
        found.append(f"{type(at).__name__}: {' '.join(str(at).split())[:300]}")
        at = at.__cause__
    return "; from ".join(found)


def medians(calls: Mapping[str, Call], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Median milliseconds of calls timed in turn, so that clock changes affect all of them alike.

    Args:
        warm_up: rounds beforehand, on CUDA, in which kernels are compiled and memory is reserved.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    turns = [lambda mark, call=call: call() for call in calls.values()]
    take_turns(turns, warm_up if device.type == "cuda" else 0, device)
    taken = zip(calls, take_turns(turns, rounds, device), strict=True)
    return {name: 1e3 * statistics.median(one.total for one in rounds_of) for name, rounds_of in taken}
