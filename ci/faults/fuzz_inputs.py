"""Generated command lines, flags and files: no mistake of a user's may end in a traceback, what is refused is refused
by name, and what is accepted is read as it was written.

    python ci/faults/fuzz_inputs.py --examples 300                      continuous integration
    python ci/faults/fuzz_inputs.py --examples 100000                   every night
    python ci/faults/fuzz_inputs.py --examples 100000 --part 2/4        a quarter of these
    python ci/faults/fuzz_inputs.py --examples 2000 --kind plan         one kind of input

Ends with 1 and the shortest example that hypothesis finds. Commands are called in this process, up to where they would
start ranks, write a picture, or train. The same numbers give the same inputs.
"""

from __future__ import annotations

import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import fuzz_commands
import fuzz_files
import fuzz_megatron
import typer
from fuzz_megatron import training  # noqa: F401  (what tests plant a fault for)
from fuzz_words import Found, Hangs, Kind, at_most
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

BATCH = 250
"""Inputs from one seed: hypothesis slows down with many more."""
ENOUGH = 200
"""Inputs of a kind of which some must be accepted, and some refused: otherwise nothing was tried."""


@dataclass(slots=True)
class Tried:
    """What became of a kind of input."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """Of processor time."""
    found: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Of inputs."""
        return self.outcomes.total()


def kinds() -> list[Kind]:
    """All that there are."""
    return [*fuzz_commands.kinds(), *fuzz_megatron.kinds(), *fuzz_files.kinds()]


def sizes(examples: int, chosen: Sequence[Kind]) -> dict[str, int]:
    """How many inputs of each kind."""
    total = sum(kind.share for kind in chosen)
    return {kind.name: -(-examples * kind.share // total) for kind in chosen}


def fuzz(kind: Kind, examples: int, part: tuple[int, int] = (1, 1)) -> Tried:
    """Try about so many inputs of a kind; of several parts, one."""
    tried = Tried()
    start = time.process_time()
    for number, first in enumerate(range(0, examples, BATCH)):
        if number % part[1] == part[0] - 1 and not tried.found:
            _batch(kind, number, min(BATCH, examples - first), tried)
    tried.seconds = time.process_time() - start
    return tried


def _batch(kind: Kind, number: int, examples: int, tried: Tried) -> None:
    silent = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": False}

    @seed(number)
    @settings(max_examples=examples, **silent)
    @given(st.tuples(*kind.inputs))
    def one(value: tuple[object, ...]) -> None:
        try:
            with at_most():
                outcome = kind.check(*value)
        except Hangs:
            raise Hangs(f"{value}: hangs") from None  # past hypothesis, which would try a hundred shorter ones
        except Found:
            raise
        except Exception:
            raise Found(f"{value}: {traceback.format_exc()}") from None
        tried.outcomes[outcome] += 1

    try:
        one()
    except (Found, Hangs) as error:
        tried.found.append(f"{kind.name}: {error}")
    except ExceptionGroup as several:
        tried.found += [f"{kind.name}: {error}" for error in several.exceptions]


def idle(name: str, tried: Tried) -> list[str]:
    """What is wrong with inputs that all had the same end: then nothing was tried."""
    if tried.number < ENOUGH or len(tried.outcomes) == 2:
        return []
    return [f"{name}: all {tried.number} inputs were {next(iter(tried.outcomes))}: nothing was tried"]


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        print(f"error: --part {text}: write a number and how many there are, such as 2/4", file=sys.stderr)
        raise typer.Exit(2)
    return int(found[1]), int(found[2])


def _chosen(names: list[str] | None) -> list[Kind]:
    known = {kind.name: kind for kind in kinds()}
    for name in names or ():
        if name not in known:
            print(f"error: --kind {name}: choose one of {', '.join(known)}", file=sys.stderr)
            raise typer.Exit(2)
    return [known[name] for name in names] if names else list(known.values())


def main(
    examples: Annotated[int, typer.Option(min=1, help="inputs to try, of all kinds together")] = 300,
    part: Annotated[str, typer.Option(metavar="K/N", help="try the Kth of N parts of them")] = "1/1",
    kind: Annotated[list[str] | None, typer.Option(help="try this kind only; repeat for several")] = None,
) -> None:
    chosen, which = _chosen(kind), _part(part)
    fuzz_megatron.prepare()
    asked, found = sizes(examples, chosen), []
    total: Counter[str] = Counter()
    for one in chosen:
        tried = fuzz(one, asked[one.name], which)
        tried.found += idle(one.name, tried)
        found += tried.found
        total += tried.outcomes
        accepted, refused = tried.outcomes["accepted"], tried.outcomes["refused"]
        each = f"{tried.number / max(tried.seconds, 1e-9):7.0f} a second"
        state = "FOUND" if tried.found else "nothing found"
        print(f"{one.name:18} {accepted:6} accepted {refused:6} refused {each}: {state}", flush=True)
        for text in tried.found:
            print(f"FOUND in {text}", file=sys.stderr, flush=True)
    print(
        f"{total.total()} inputs, {total['accepted']} accepted, {total['refused']} refused: "
        f"{len(found)} kinds of input with a traceback, a wrong acceptance, a hang, or a refusal without a name"
    )
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
