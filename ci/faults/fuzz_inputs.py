"""Generated command lines, flags and files: no input ends in a traceback, refusals name their cause, and accepted
values are read as written.

    python ci/faults/fuzz_inputs.py --examples 300                      every change
    python ci/faults/fuzz_inputs.py --examples 100000                   every night
    python ci/faults/fuzz_inputs.py --examples 2000 --kind plan         one kind of input

Exits with 1 and the shortest example that hypothesis finds. Commands run in this process up to the point where they
would start ranks, draw, or train. The same numbers generate the same inputs.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import fuzz_commands
import fuzz_files
import fuzz_megatron
import typer
from fuzz_megatron import training  # noqa: F401  (tests plant a fault in it)
from fuzz_words import Found, Hangs, Kind, at_most
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

BATCH = 250
"""Inputs per seed: hypothesis slows down with many more."""
ENOUGH = 200
"""Inputs of a kind among which some must be accepted and some refused; otherwise nothing was tested."""


def kinds() -> list[Kind]:
    return [*fuzz_commands.kinds(), *fuzz_megatron.kinds(), *fuzz_files.kinds()]


def sizes(examples: int, chosen: Sequence[Kind]) -> dict[str, int]:
    """Number of inputs of each kind."""
    total = sum(kind.share for kind in chosen)
    return {kind.name: -(-examples * kind.share // total) for kind in chosen}


def fuzz(kind: Kind, examples: int) -> tuple[Counter[str], list[str]]:
    """Try about that many inputs of a kind; outcomes, and what is wrong."""
    outcomes: Counter[str] = Counter()
    found: list[str] = []
    for number, first in enumerate(range(0, examples, BATCH)):
        if not found:
            found = _batch(kind, number, min(BATCH, examples - first), outcomes)
    if outcomes.total() >= ENOUGH and len(outcomes) < 2:
        found.append(f"{kind.name}: all {outcomes.total()} inputs were {next(iter(outcomes))}: nothing was tested")
    return outcomes, found


def _batch(kind: Kind, number: int, examples: int, outcomes: Counter[str]) -> list[str]:
    silent = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "print_blob": False}

    @seed(number)
    @settings(max_examples=examples, **silent)
    @given(st.tuples(*kind.inputs))
    def one(value: tuple[object, ...]) -> None:
        try:
            with at_most():
                outcome = kind.check(*value)
        except Hangs:
            raise Hangs(f"{value}: hangs") from None  # not for hypothesis, which would try a hundred shorter ones
        except Found:
            raise
        except Exception:
            raise Found(f"{value}: {traceback.format_exc()}") from None
        outcomes[outcome] += 1

    try:
        one()
    except (Found, Hangs) as error:
        return [f"{kind.name}: {error}"]
    except ExceptionGroup as several:
        return [f"{kind.name}: {error}" for error in several.exceptions]
    return []


def main(
    examples: Annotated[int, typer.Option(min=1, help="inputs of all kinds together")] = 300,
    kind: Annotated[list[str] | None, typer.Option(help="try this kind only; repeat for several")] = None,
) -> None:
    known = {one.name: one for one in kinds()}
    for name in kind or ():
        if name not in known:
            print(f"error: --kind {name}: choose one of {', '.join(known)}", file=sys.stderr)
            raise typer.Exit(2)
    chosen = [known[name] for name in kind or known]
    fuzz_megatron.prepare()
    asked, total, bad = sizes(examples, chosen), Counter(), 0
    for one in chosen:
        start = time.process_time()
        outcomes, found = fuzz(one, asked[one.name])
        total += outcomes
        bad += len(found)
        rate = f"{outcomes.total() / max(time.process_time() - start, 1e-9):7.0f} a second"
        counts = f"{outcomes['accepted']:6} accepted {outcomes['refused']:6} refused {rate}"
        print(f"{one.name:18} {counts}: {'FOUND' if found else 'nothing found'}", flush=True)
        for text in found:
            print(f"FOUND in {text}", file=sys.stderr, flush=True)
    print(
        f"{total.total()} inputs, {total['accepted']} accepted, {total['refused']} refused: "
        f"{bad} kinds of input with a traceback, a wrong acceptance, a hang, or a refusal without a name"
    )
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
