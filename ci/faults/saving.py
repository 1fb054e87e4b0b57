"""SIGKILL at a random moment of saving, repeatedly, in one training.

    start -> steps, each saved -> killed in a save -> start -> steps, each saved -> killed in a save -> ... -> start

Every start must resume from the last checkpoint reported as saved, or from a later complete one, and the loss of every
step must equal that of an undisturbed run bit for bit: a start verifies the previous kill and takes the next one.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import special
import trial
from faults import LIMIT, TIMEOUT
from planted import Plant
from trial import Ended

KILLS = 25
"""At most in one folder."""
STEPS = 150
"""Of the training; a start with fewer than ``ROOM`` steps left is the last in its folder."""
ROOM = 50
_LONGEST = {"torch": 0.1, "torch_dist": 0.6}
"""Approximate seconds of a save; a moment after its end falls into the next save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Kills of one training in one folder."""

    name: str
    style: str
    """``--ckpt-format``."""
    kills: int
    seed: int


def chains(kills: int, seed: int) -> list[Chain]:
    """Divide the kills over folders, half in each format."""
    number = max(2, -(-kills // KILLS))
    share = [kills // number + (i < kills % number) for i in range(number)]
    styles = list(_LONGEST)
    return [
        Chain(name=f"saves-{i + 1}", style=styles[i % 2], kills=share[i], seed=seed * 1000 + i)
        for i in range(number)
        if share[i]
    ]


def undisturbed(steps: int) -> dict[int, str]:
    """Iteration -> loss of the first steps of the same training without saving."""
    ended = trial.train(f"{_flags()} --exit-interval {steps}")
    if ended.status or len(ended.losses) != steps:
        raise special.Wrong(f"the undisturbed run ended with {ended.status}: {ended.text[-2000:]}")
    return ended.losses


def run(chain: Chain, losses: dict[int, str]) -> list[dict[str, object]]:
    """A row per kill with what the next start did; after a failure the training restarts in a new folder."""
    moments = random.Random(chain.seed)
    rows: list[dict[str, object]] = []
    while len(rows) < chain.kills:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            for row in _killed(chain.style, moments, Path(folder), losses, kills=chain.kills - len(rows)):
                rows.append({"name": f"{chain.name}.{len(rows) + 1}"} | row)
    return rows


def _killed(
    style: str, moments: random.Random, folder: Path, losses: dict[int, str], *, kills: int
) -> Iterator[dict[str, object]]:
    saved = 0
    row: dict[str, object] = {}
    for i in range(kills + 1):
        plant = _plant(style, moments, saved) if i < kills and saved < STEPS - ROOM else None
        flags = f"{_flags()} --ckpt-format {style} --save {folder} --load {folder} --save-interval 1"
        ended = trial.train(
            flags if plant else f"{flags} --exit-interval 1", timeout=TIMEOUT, plants=[plant] if plant else []
        )
        try:
            first = resumed_at(ended, saved, losses)
            if plant is not None:
                _must_be_killed(ended)
        except special.Wrong as wrong:
            yield (row or _described(style, plant)) | {"verdict": "WRONG", "message": str(wrong)}
            return
        if row:
            yield row | {"message": f"resumed from iteration {first - 1}"}
        if plant is None:
            return
        saved = max([first - 1, *(int(said) for said in re.findall(_SAVED, ended.text))])
        row = _described(style, plant) | {"seconds": ended.seconds, "status": ended.status}


_SAVED = r"successfully saved checkpoint from iteration +(\d+)"


def _flags() -> str:
    return special.base(special.UNDISTURBED).replace(f"--train-iters {special.STEPS}", f"--train-iters {STEPS}")


def _plant(style: str, moments: random.Random, saved: int) -> Plant:
    delay = moments.uniform(0, _LONGEST[style])
    return Plant(rank=moments.randrange(2), at=f"saving:{delay}", step=saved + moments.randint(1, 2), do="kill")


def _described(style: str, plant: Plant | None) -> dict[str, object]:
    what = f"{style}: SIGKILL of rank {plant.rank} at {plant.at} of step {plant.step}" if plant else style
    return {"what": what, "expect": "resumes", "verdict": "ok", "seconds": 0.0}


def resumed_at(ended: Ended, saved: int, losses: dict[int, str]) -> int:
    """The first step of this start; Wrong if it repeats saved steps or a loss differs."""
    if not ended.losses:
        raise special.Wrong(f"the next start ended with {ended.status}, without a step: {ended.text[-1500:]}")
    first = min(ended.losses)
    if first <= saved:
        raise special.Wrong(f"the next start resumed from {first - 1}, but {saved} had been saved")
    if first > 1 and not re.search(rf"loading .*checkpoint from .* at iteration {first - 1}\b", ended.text):
        raise special.Wrong(f"the next start began with step {first} without reading a checkpoint")
    other = {i: loss for i, loss in ended.losses.items() if losses.get(i) != loss}
    if other:
        raise special.Wrong(f"the next start has different losses: {other}")
    return first


def _must_be_killed(ended: Ended) -> None:
    if ended.hung or ended.left:
        raise special.Wrong(f"hung: {ended.hung}; left running: {ended.left}")
    if ended.status == 0:
        raise special.Wrong("the training was not killed")
    if ended.seconds > LIMIT * TIMEOUT:
        raise special.Wrong(f"the last rank exited {ended.seconds:.1f} s after the kill")
