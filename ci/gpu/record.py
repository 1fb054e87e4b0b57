"""Result file of one step of the check: JSON, written while the step runs so that a killed step keeps what it had.

    record.py MODULE:STEP FOLDER SECONDS BEGAN [--smoke]     run a step, a function of its ``Step``: ``plan.py`` does

{"step": "providers", "finished": true, "error": "", "seconds": 61.2, "commit": "...",
 "checks": [{"group": ..., "name": ..., "ok": true, "of": ["provider ring"], "detail": {...}}],
 "figures": [{"group": ..., "name": ..., "value": 0.81, "wanted": [">=", 0.75], "of": [...], "detail": {...}}],
 "not_run": [{"name": ..., "reason": ...}]}

``of`` names the kernels and providers (``cases.kernel``, ``cases.provider``) that a check needs, or a figure times. A
figure is withheld if a check of its own kernels and providers, and no others, is wrong. What could not run is neither
right nor wrong: a case says so with ``NotRun``, and ``refusal`` tells which exceptions of libraries mean the same.
"""

from __future__ import annotations

import json
import math
import os
import pkgutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from cp_plugin.testing.clock import take_turns

_WRITE_EVERY_S = 1.0
OUT_OF_TIME = "out of time: the cap of its step"
REFUSE = ("fla", "flash_attn", "flash_attn_interface", "flash_attn_3", "transformer_engine")
"""Libraries whose own Python code refuses a GPU, a version or a size by a RuntimeError."""
Verdict = tuple[bool | None, dict[str, Any]]
"""Whether a result is right (None: not run, for the ``reason`` in the detail), and a detail."""
Row = tuple[str, str, bool | None, dict[str, Any]]
"""Group, name, and what was found."""
Call = Callable[[], object]


class NotRun(Exception):
    """Raised by a case that cannot run here, with the reason."""


class Step:
    """One step of the check.

    Args:
        folder: of the JSON file.
        seconds: time after which nothing new starts.
        began: when that time began, on this machine's monotonic clock; None: now.
        smoke: tiny shapes on the CPU.
    """

    def __init__(
        self, name: str, folder: Path, seconds: float = 600.0, began: float | None = None, *, smoke: bool = False
    ) -> None:
        self.smoke, self.folder = smoke, folder
        self.device = torch.device("cpu" if self.smoke else "cuda")
        self.devices = 0 if self.smoke else torch.cuda.device_count()
        """GPUs for ranks over process groups; 0: Gloo on the CPU."""
        self.library = "Gloo" if self.smoke else "NCCL"
        self._seconds, self._written = seconds, -math.inf
        self._start = time.monotonic() if began is None else began
        self._lost = ""
        self._file = folder / f"{name}.json"
        self._content: dict[str, Any] = {"step": name, "finished": False, "error": "", "seconds": 0.0, "now": ""}
        self._content |= {"commit": os.environ.get("COMMIT", ""), "checks": [], "figures": [], "not_run": []}
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def left(self) -> float:
        """Seconds in which something new may start."""
        return self._seconds - (time.monotonic() - self._start)

    @property
    def late(self) -> bool:
        return self.left <= 0

    def note(self, **values: Any) -> None:
        """Add facts about the whole step."""
        self._content |= values
        self._write()

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

    def add(self, group: str, name: str, ok: bool | None, detail: Mapping[str, Any]) -> None:
        """Record a ``Row``, whose detail may have ``of``."""
        if ok is None:
            self.not_run(f"{group}: {name}", detail["reason"])
            return
        shown = {key: value for key, value in detail.items() if key != "of"}
        row = {"group": group, "name": name, "ok": bool(ok), "of": list(detail.get("of", ())), "detail": shown}
        self._add("checks", row)
        if not ok:
            print(f"WRONG  {group}: {name}: {shown}", flush=True)

    def attempt(self, group: str, name: str, call: Callable[[], Verdict], of: Sequence[str] = ()) -> None:
        """Record the verdict of a call."""
        if self._begin(f"{group}: {name}"):
            ok, detail = judge(call)
            self.add(group, name, ok, {"of": of} | detail)
            if lost(detail):
                self._lost = f"the device was lost in {group}: {name}"

    def measure(self, name: str, call: Call) -> None:
        """Run a call that records its own figures; a failure does not prevent other measurements."""
        if self._begin(name):
            try:
                call()
            except Exception as error:  # of any library
                self.not_run(name, one_line(error))

    def _begin(self, name: str) -> bool:
        """Note what runs now. Return False if it may not: after the cap, or after an error of the device, since then
        nothing in this process can be right."""
        if reason := self._lost or (OUT_OF_TIME if self.late else ""):
            self.not_run(name, reason)
        else:
            self.note(now=name)
        return not reason

    def run(self, call: Callable[[Step], object]) -> int:
        """Call it, and record how it ends: 1 if it fails, or has found anything wrong."""
        try:
            call(self)
            self._content["finished"] = True
        except Exception as error:  # of any library
            self._content["error"] = one_line(error)
            traceback.print_exc()
        self._write()
        wrong = sum(not check["ok"] for check in self._content["checks"])
        checks, figures = len(self._content["checks"]), len(self._content["figures"])
        print(f"{self._content['step']}: {checks} checks, {wrong} wrong; {figures} figures", flush=True)
        return int(wrong > 0 or not self._content["finished"])

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


def judge(call: Callable[[], Verdict]) -> Verdict:
    """The verdict of a call; an exception is wrong, unless it is a ``refusal``."""
    try:
        return call()
    except Exception as error:  # of any library, or of the compiler
        return stopped(error)


def stopped(error: BaseException) -> Verdict:
    """What an exception says of a case: that it could not run, or that it is wrong."""
    reason = refusal(error)
    return (False, {"failure": one_line(error)}) if reason is None else (None, {"reason": reason})


def lost(detail: dict[str, Any]) -> bool:
    """Whether a case ended with an error of the device, after which CUDA fails in every call of this process."""
    return any(text in detail.get("failure", "") for text in ("CUDA error", "Triton Error [CUDA]"))


def refusal(error: BaseException) -> str | None:
    """The reason, if an exception or a cause of it says that something cannot run on this machine."""
    for cause in _causes(error):
        if isinstance(cause, NotRun):
            return str(cause)
        if isinstance(cause, torch.OutOfMemoryError):
            return "this GPU has too little memory for it"
        library = (cause.name or "").partition(".")[0] if isinstance(cause, ImportError) else ""
        refused = type(cause) in (RuntimeError, NotImplementedError) and _raised_in(cause) in REFUSE
        if refused or library not in ("", "cp_plugin", "cp_kernels"):
            return one_line(cause)
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _raised_in(error: BaseException) -> str:
    """The top-level package whose Python code raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").partition(".")[0] if frames else ""


def worst(errors: Mapping[str, float], limits: Mapping[str, float]) -> Verdict:
    """Whether all errors are within their limits, and the one closest to (or furthest beyond) its limit."""

    def finite(x: float) -> float | str:
        return x if math.isfinite(x) else str(x)  # JSON has no infinity and no NaN

    name = max(errors, key=lambda name: errors[name] / max(limits[name], 1e-30))
    detail = {"tensor": name, "error": finite(errors[name]), "limit": finite(limits[name])}
    return all(errors[name] <= limits[name] for name in errors), detail


def one_line(error: BaseException) -> str:
    """An exception and its causes, abbreviated."""
    parts = (f"{type(one).__name__}: {' '.join(str(one).split())[:300]}" for one in islice(_causes(error), 3))
    return "; from ".join(parts)


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


def main() -> int:
    step, folder, seconds, began, *smoke = sys.argv[1:]
    record = Step(step.partition(":")[2], Path(folder), float(seconds), float(began), smoke=bool(smoke))
    return record.run(lambda record: pkgutil.resolve_name(step)(record))


if __name__ == "__main__":
    from record import main  # the module that the steps import: they raise its exceptions

    sys.exit(main())
