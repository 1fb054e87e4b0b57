"""Faults that are planted in a training run, for tests that must find them: a row each."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rank_faults import replace, wrap

type Plant = Callable[[], None]


def planted(target: str, name: str = "") -> Callable[[Callable[[Any], Any]], Plant]:
    """Make a fault of a function from what ``module:qualified.name`` holds to what replaces it."""
    return lambda make: _named(partial(replace, target, make), name or make.__name__)


def instead(target: str, name: str = "") -> Callable[[Callable[..., Any]], Plant]:
    """Make a fault of a function that is called in the place of another, with that one as its first argument."""
    return lambda wrong: _named(partial(wrap, target, wrong), name or wrong.__name__)


def _named(plant: Any, name: str) -> Plant:
    plant.__name__ = name
    return plant


def replace_slicer(slicer: Callable[..., Any]) -> None:
    """Replace the batch slicer in every module that imported it, as another extension might."""
    from cp_plugin.megatron.patches import patching

    ours = sys.modules["megatron.core.utils"].get_batch_on_this_cp_rank
    for module in patching.importers().values():
        for name in [name for name, value in vars(module).items() if value is ours]:
            setattr(module, name, slicer)


def stock(name: str, *places: str) -> Plant:
    """Put Megatron's own functions back, each where it is used."""

    def plant() -> None:
        from cp_plugin.megatron.patches import patching

        for place in places:
            user, _, target = place.partition("=")
            replace(user, lambda _, target=target or user: patching.original(target))

    return _named(plant, name)


class Fault(NamedTuple):
    plant: Plant
    flags: str
    error: str
    """Pattern of the message that stops the run before its first step."""

    @property
    def name(self) -> str:
        return f"{self.plant.__name__}-{self.flags.split()[3]}"


def ranks_of(flags: str) -> int:
    """Of a run without data parallelism."""
    words = flags.split()
    return math.prod(int(words[i + 1]) for i, word in enumerate(words) if word.endswith("-parallel-size"))
