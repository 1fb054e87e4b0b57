"""What a step of the check writes down: one JSON file, from which ``report.py`` makes the page.

    {"step": "providers", "finished": true, "error": "", "seconds": 61.2, "commit": "...",
     "checks": [{"group": ..., "name": ..., "ok": true, "detail": {...}}],
     "figures": [{"group": ..., "name": ..., "value": 0.81, "wanted": [">=", 0.75], "detail": {...}}],
     "not_run": [{"name": ..., "reason": ...}]}

The file is written while the step runs, so that a step that is stopped leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

_WRITE_EVERY_S = 1.0
OUT_OF_TIME = "out of time"
Found = tuple[bool | None, dict[str, Any]]
"""Whether something is right (None: not run, for the ``reason`` in the detail), and a detail."""
Row = tuple[str, str, bool | None, dict[str, Any]]
"""Group, name, and what was found."""


class Step(AbstractContextManager["Step"]):
    """One step of the check: ``with Step("providers") as step: ...``"""

    def __init__(self, name: str, arguments: list[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=f"the step {name!r} of ci/gpu/check.sh")
        parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the JSON file")
        parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
        parser.add_argument("--seconds", type=float, default=600.0, help="begin nothing after so many")
        given = parser.parse_args(arguments)
        self.smoke: bool = given.smoke
        self.device = torch.device("cpu" if self.smoke else "cuda")
        self.folder: Path = given.out
        self._seconds, self._start, self._written = given.seconds, time.monotonic(), -math.inf
        self._file = given.out / f"{name}.json"
        self._content: dict[str, Any] = {"step": name, "finished": False, "error": "", "seconds": 0.0}
        self._content["commit"] = os.environ.get("COMMIT", "")
        self._content |= {"checks": [], "figures": [], "not_run": []}
        given.out.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def late(self) -> bool:
        """Whether nothing more should begin."""
        return self.left <= 0

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self._seconds - (time.monotonic() - self._start)

    @property
    def devices(self) -> int:
        """GPUs for ranks over process groups; 0: Gloo on the CPU."""
        return 0 if self.smoke else torch.cuda.device_count()

    @property
    def library(self) -> str:
        """What messages of such ranks go over."""
        return "Gloo" if self.smoke else "NCCL"

    def note(self, **values: Any) -> None:
        """Say something about the whole step."""
        self._content |= values
        self._write()

    def check(self, group: str, name: str, ok: bool, **detail: Any) -> None:
        """Something that is right or wrong."""
        self._add("checks", {"group": group, "name": name, "ok": bool(ok), "detail": detail})
        if not ok:
            print(f"WRONG  {group}: {name}: {detail}", flush=True)

    def figure(
        self, group: str, name: str, value: float, wanted: tuple[str, float] | None = None, **detail: Any
    ) -> None:
        """Something that was measured, as a ratio, and what was hoped for: (">=" or "<=", number)."""
        self._add("figures", {"group": group, "name": name, "value": value, "wanted": wanted, "detail": detail})
        print(
            f"{group}: {name}: {value:.3f} {'' if wanted is None else f'(wanted {wanted[0]} {wanted[1]})'}", flush=True
        )

    def not_run(self, name: str, reason: str) -> None:
        """Something that could not be looked at."""
        self._add("not_run", {"name": name, "reason": " ".join(reason.split())})

    def stopped(self, group: str, name: str, how: str) -> None:
        """Something that came to no result: it is wrong, unless there was no time left for it."""
        if how == OUT_OF_TIME:
            self.not_run(f"{group}: {name}", how)
        else:
            self.check(group, name, False, failure=how)

    def add(self, group: str, name: str, ok: bool | None, detail: dict[str, Any]) -> None:
        """A ``Row``."""
        if ok is None:
            self.not_run(f"{group}: {name}", detail["reason"])
        else:
            self.check(group, name, ok, **detail)

    def attempt(self, group: str, name: str, call: Callable[[], Found]) -> None:
        """Check what a call finds; a call that fails is wrong, and not one that this GPU is too small for."""
        if self.late:
            self.stopped(group, name, OUT_OF_TIME)
            return
        try:
            self.add(group, name, *call())
        except torch.OutOfMemoryError:
            self.not_run(f"{group}: {name}", "this GPU has too little memory for it")
        except Exception as error:  # of any library, or of the compiler
            self.stopped(group, name, in_a_line(error))

    def measure(self, name: str, call: Callable[[], object]) -> None:
        """A call that makes figures of its own; where it fails, the others are still measured."""
        reason = OUT_OF_TIME if self.late else ""
        if not reason:
            try:
                call()
            except Exception as error:  # of any library
                reason = in_a_line(error)
        if reason:
            self.not_run(name, reason)

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
        new.write_text(json.dumps(self._content, indent=1, allow_nan=False, default=_plain))
        new.replace(self._file)


def finite(x: float) -> float | str:
    """JSON has no infinity and no NaN."""
    return x if math.isfinite(x) else str(x)


def found_by(call: Callable[[], Found]) -> Found:
    """What a call finds; one that fails is wrong."""
    try:
        return call()
    except Exception as error:  # of any library, or of the compiler
        return False, {"failure": in_a_line(error)}


def worst(errors: Mapping[str, float], limits: Mapping[str, float]) -> Found:
    """Whether all errors are within their limits, and the one that is nearest to its own, or furthest beyond."""
    name = max(errors, key=lambda name: errors[name] / max(limits[name], 1e-30))
    detail = {"tensor": name, "error": finite(errors[name]), "limit": finite(limits[name])}
    return all(errors[name] <= limits[name] for name in errors), detail


def in_a_line(error: BaseException) -> str:
    """An exception and its causes, short."""
    found, at = [], error
    while at is not None and len(found) < 3:
        found.append(f"{type(at).__name__}: {' '.join(str(at).split())[:300]}")
        at = at.__cause__
    return "; from ".join(found)


def _plain(x: object) -> object:
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    raise TypeError(f"{type(x)} in a result")
