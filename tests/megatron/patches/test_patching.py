"""Patching: contracts, replacement by identity, refusals, undo."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Patch, replaces
from cp_plugin.megatron.state import STATE

SOURCE = '''
def slow(x: int) -> int:
    """Documented."""
    # a comment
    return x + 1


class Provider:
    def answer(self) -> int:
        return 1
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: None) -> Iterator[types.ModuleType]:
    """A module ``somelib`` that can be patched."""
    (tmp_path / "somelib.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import somelib  # type: ignore[import-not-found]

    patching.undo()
    yield somelib
    patching.undo()
    sys.modules.pop("somelib", None)


def _patch(
    target: str = "somelib:slow", make: Callable = lambda original: lambda x: original(x) * 10, **more: Any
) -> Patch:
    return Patch(target=target, make=make, reason="a test", **more)


TENFOLD = replaces("somelib:slow", "a test", "x")(lambda call: 10 * call.original())


def _held_by_megatron() -> set[str]:
    """Every name in Megatron's modules and classes that refers to a function or class of the plugin."""
    held = set()
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron" and module}
    for name, module in modules.items():
        classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == name}
        for prefix, owner in (("", module), *((f"{k}.", v) for k, v in classes.items())):
            for attribute, value in list(vars(owner).items()):
                value = value.__func__ if isinstance(value, staticmethod) else value
                code = getattr(value, "__code__", None)
                file = code.co_filename if code is not None else str(getattr(value, "__module__", "")).replace(".", "/")
                if "cp_plugin/" in file and "cuda_surface" not in file:  # which is about torch
                    held.add(f"{name}:{prefix}{attribute}")
    return held


def test_nothing_of_megatrons_is_replaced_outside_of_the_table(validated: Callable[..., object]) -> None:
    """In the modules that a training run has imported once flags that need every kind of patch are validated."""
    validated("--context-parallel-size 4 --cp-provider ring --cp-linear-attention gla --cp-layer-pattern LN")
    held = _held_by_megatron()
    own = {target for scope in ("run", "process") for target in patching.installed(scope)}
    assert len(own) >= 15
    assert own <= held, own - held
    names = {target.rpartition(":")[2] for target in own}
    assert {place for place in held if place.rpartition(":")[2] not in names} == set()


def test_a_router_that_a_cuda_graph_captures_is_left_alone(validated: Callable[..., object]) -> None:
    graphs = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps 0 --cuda-graph-modules"
    for part, replaced in (("moe_router", False), ("mlp", True)):
        validated(f"--context-parallel-size 4 --cp-provider ring --num-experts 4 {graphs} {part}")
        assert ("megatron.core.transformer.moe.router:TopKRouter.forward" in patching.installed("run")) is replaced


def test_a_function_is_replaced_wherever_it_was_imported_by_value(library: types.ModuleType) -> None:
    importer = types.ModuleType("importer")
    importer.renamed = library.slow
    sys.modules["importer"] = importer
    try:
        original = library.slow
        patching.install([_patch()])
        assert library.slow(1) == importer.renamed(1) == 20
        assert patching.installed() == ["somelib:slow"]
        assert patching.original("somelib:slow") is original
        replacement = library.slow
        patching.install([_patch()])
        assert library.slow is replacement, "installing again changes nothing"
        importer.later = library.slow  # imported while the patch is in place
        patching.undo()
        assert library.slow is importer.renamed is importer.later is original
        assert patching.installed() == []
    finally:
        del sys.modules["importer"]


def test_all_broken_contracts_are_named_and_nothing_is_replaced(library: types.ModuleType) -> None:
    bad = [
        _patch(parameters=("batch", "group"), otherwise="ranks would keep other tokens"),
        _patch("somelib:Provider.answer", lambda original: original, form="registers", parameters=("question",)),
        _patch("somelib:gone", lambda original: original),
    ]
    with pytest.raises(ValueError, match="cannot run on this megatron-core") as error:
        patching.install(bad)
    message = str(error.value)
    for part in (
        "somelib:slow (a test): it has no parameter batch, group.",
        "If it ran, ranks would keep other tokens.",
        "somelib:Provider.answer (a test): it has no parameter question.",
        "gone is not in somelib",
        "--cp-provider upstream",
    ):
        assert part in message
    assert library.slow(1) == 2
    assert patching.installed() == []


def test_a_symbol_that_is_not_in_every_version_may_be_absent(library: types.ModuleType) -> None:
    patching.install([_patch("somelib:gone", required=False), _patch("somelib.nowhere:gone", required=False)])
    assert patching.installed() == []


def test_the_start_up_check_on_one_rank_runs_what_is_replaced(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    patching.install([TENFOLD])
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    assert library.slow(1) == 20
    monkeypatch.setattr(STATE, "trial", True)
    assert library.slow(1) == 2


def test_a_parameter_that_a_later_version_adds(library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a function that is replaced: its default is what the replacement does; other values are refused."""

    def slow(x: int, y: int = 3, *, mode: str = "plain") -> int:
        return x + y

    def required(x: int, y: int) -> int:
        return x + y

    monkeypatch.setattr(library, "slow", slow)
    patching.install([TENFOLD])
    assert library.slow(1) == library.slow(1, mode="plain") == library.slow(1, y=3) == 40
    with pytest.raises(ValueError, match="somelib:slow was called with mode='other', a parameter that this Megatron"):
        library.slow(1, mode="other")
    patching.undo()
    monkeypatch.setattr(library, "slow", required)
    assert "it requires y" in str(patching.examine(TENFOLD).broken)


def test_a_symbol_that_another_extension_replaced_is_wrapped_in_turn(library: types.ModuleType) -> None:
    original = library.slow

    @functools.wraps(original)
    def somebody_elses(x: int) -> int:
        return original(x) - 1

    library.slow = somebody_elses
    patching.install([_patch(parameters=("x",))])
    assert library.slow(1) == 10
    patching.undo()


@pytest.mark.parametrize("version", ["0.17.1", "0.21.0", "0.21.0rc1", "1.0.0"])
def test_a_megatron_outside_the_range_is_refused(adapter: None, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from megatron.core import package_info

    from cp_plugin.megatron import activate

    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(ValueError, match=rf"megatron-core {version} is not supported: .*>=0.18,<0.21"):
        activate(["--cp-device", "cpu"])
