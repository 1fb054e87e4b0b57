"""The branches for versions of Megatron-Core: features, and functions that have moved."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from cp_plugin.megatron import compat


def test_features_by_version() -> None:
    assert [compat.weakens_expert_losses(version) for version in ("0.18.2", "0.19.0")] == [True, False]


OLD, NEW = "megatron.core.ssm.mamba_context_parallel", "megatron.core.ops.ssm.mamba2.context_parallel"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """A module that only forwards to another, and that one."""
    for name in (OLD, NEW):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    old, new = sys.modules[OLD], sys.modules[NEW]
    old.__getattr__ = lambda name: getattr(new, name)
    return old, new


def test_a_moved_function_is_found_in_its_new_module(moved: tuple[ModuleType, ModuleType]) -> None:
    old, new = moved
    new.function = lambda: None
    new.Layer = type("Layer", (), {"forward": lambda self: None})
    assert old.function is new.function
    assert compat.find(f"{OLD}:function") == (new, new.function)
    assert compat.find(f"{OLD}:Layer.forward") == (new.Layer, vars(new.Layer)["forward"])
    old.function = lambda: None
    del new.function
    assert compat.find(f"{OLD}:function") == (old, old.function)


def test_a_module_that_has_moved_is_not_asked_for(
    moved: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it would warn."""
    _, new = moved
    new.function, imported = lambda: None, []
    monkeypatch.setattr(compat.importlib, "import_module", lambda name: imported.append(name) or sys.modules[name])
    assert compat.find(f"{OLD}:function") == (new, new.function)
    assert imported == [NEW]


@pytest.mark.parametrize("target", [f"{OLD}:function", f"{OLD}:Layer.forward", "megatron.core.gone:function"])
def test_a_missing_function_is_named(moved: tuple[ModuleType, ModuleType], target: str) -> None:
    with pytest.raises(ValueError, match=f"{target.partition(':')[2]} is not in megatron.core.*and cp_plugin needs it"):
        compat.find(target)


def test_a_module_whose_import_fails_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_another(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(compat.importlib, "import_module", needs_another)
    with pytest.raises(ModuleNotFoundError, match="other"):
        compat.find(f"{OLD}:function")
