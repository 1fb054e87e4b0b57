"""Faults that are planted in a training run, for tests that must find them: a row each."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from nightly import nightly

type Plant = Callable[[], None]


def planted(target: str, name: str = "") -> Callable[[Callable[[Any], Any]], Plant]:
    """Make a fault of a function from what ``module:qualified.name`` holds to what replaces it."""

    def fault_of(make: Callable[[Any], Any]) -> Plant:
        def plant() -> None:
            module, _, path = target.partition(":")
            *owners, attribute = path.split(".")
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            setattr(owner, attribute, make(getattr(owner, attribute)))

        plant.__name__ = name or make.__name__
        return plant

    return fault_of


def instead(target: str, name: str = "") -> Callable[[Callable[..., Any]], Plant]:
    """Make a fault of a function that is called in the place of another, with that one as its first argument."""
    return lambda wrong: planted(target, name or wrong.__name__)(
        lambda original: functools.wraps(original)(lambda *args, **named: wrong(original, *args, **named))
    )


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
            module, _, function = user.partition(":")
            setattr(importlib.import_module(module), function, patching.original(target or user))

    plant.__name__ = name
    return plant


class Fault(NamedTuple):
    plant: Plant
    flags: str
    found: str
    """Pattern of the message that stops the run before its first step."""
    alike: bool = False
    """Another fault is found in the same place; this one is planted before a merge only."""

    @property
    def name(self) -> str:
        return f"{self.plant.__name__}-{self.flags.split()[3]}"


def rows(faults: Sequence[Fault]) -> list[Any]:
    """Of a parametrised test."""
    return [pytest.param(fault, id=fault.name, marks=nightly if fault.alike else ()) for fault in faults]


def ranks_of(flags: str) -> int:
    """Of a run without data parallelism."""
    words = flags.split()
    return math.prod(int(words[i + 1]) for i, word in enumerate(words) if word.endswith("-parallel-size"))
