"""Shared by the tests of the Megatron adapter."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from warm import warm_up


@pytest.fixture(scope="module")
def _cpu_megatron() -> Iterator[None]:
    """Megatron imported in CPU mode, in this process: ranks that are forked from it start in no time."""
    from cp_plugin.megatron import activate, deactivate

    activate(["--cp-device", "cpu"])
    import cp_plugin.megatron.models.gpt  # noqa: F401

    warm_up()
    yield
    deactivate()


@pytest.fixture
def adapter(_cpu_megatron: None) -> Iterator[None]:
    """The plugin as it is activated: nothing is replaced but the start-up hooks, no provider is chosen.

    Undone only after a test that has replaced more in this process: others train in processes of their own.
    """
    from cp_plugin.megatron import activate, runtime
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.patches import patching

    activate(["--cp-device", "cpu"])
    before = patching.installed()
    yield
    if patching.installed() != before:
        patching.undo()
    runtime.configure(Settings())


@pytest.fixture
def validated(adapter: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """``validated(flags, ranks=4)``: what Megatron's parser and validation, with the plugin, make of a command line.

    arguments: in place of Megatron's module.
    """
    from megatron.training import arguments
    from training import DATA, MODEL, SGD

    def validate(
        flags: str = "", *, ranks: int = 4, without: str = "", arguments: ModuleType = arguments
    ) -> argparse.Namespace:
        usual = f"{MODEL} {DATA} {SGD} --train-iters 1"
        words = (usual.replace(without, "") if without else usual).split() + flags.split()
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        return args

    return validate
