"""The plugin behind Megatron's own extension hook (patches/megatron-lm): same flags, checks and start-up."""

from __future__ import annotations

import importlib.metadata
import subprocess
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
from feature_faults import STRIPED

ROOT = Path(__file__).parents[3]


@pytest.fixture
def patched(adapter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A patched copy of Megatron's arguments module; the plugin replaces nothing in it."""
    from megatron.training import arguments

    from cp_plugin.megatron.patches import patching

    patching.undo()
    path = tmp_path / "megatron" / "training" / "arguments.py"
    path.parent.mkdir(parents=True)
    path.write_text(Path(str(arguments.__file__)).read_text())
    minor = patching.megatron_version().rpartition(".")[0]
    folders = ROOT / "patches" / "megatron-lm"
    (patch,) = [*folders.glob(f"core_v{minor}.*/plugins.patch")] or [folders / "main" / "plugins.patch"]
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    module = types.ModuleType("megatron.training.arguments_patched")
    module.__package__ = "megatron.training"
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in offered[group].items()]

    module.entry_points = entry_points
    monkeypatch.setattr(arguments, "plugins", module.plugins, raising=False)
    return module


def test_it_does_what_the_replaced_functions_do(patched: types.ModuleType, validated: Any) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.patches import hooks, patching

    native = vars(validated(STRIPED, ranks=2, arguments=patched))
    replaced = set(patching.installed())
    ours = {patch.target for patch in hooks.COMMAND_LINE}
    assert runtime.settings().provider == "striped"
    assert not replaced & ours
    patching.undo()
    runtime.configure(Settings())
    patching.install(hooks.START_UP)
    wrapped = vars(validated(STRIPED, ranks=2))
    assert {name: str(x) for name, x in native.items()} == {name: str(x) for name, x in wrapped.items()}
    assert set(patching.installed()) == replaced | ours


def test_nothing_is_replaced_without_a_provider_and_flags_are_checked(
    patched: types.ModuleType, validated: Any
) -> None:
    from cp_plugin.megatron.patches import patching

    assert validated(ranks=2, arguments=patched).cp_provider is None
    assert patching.installed() == []
    for flags, message in (
        (STRIPED.replace("striped", "stripes"), "--cp-provider stripes: did you mean striped"),
        (f"{STRIPED} --qk-clip", "does not support --qk-clip"),
    ):
        with pytest.raises(ValueError, match=message):
            validated(flags, ranks=2, arguments=patched)


def test_an_extension_that_megatron_asks_need_not_be_wrapped_around_it(
    patched: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron import native
    from cp_plugin.megatron.patches import hooks

    assert [patch for patch in hooks.START_UP if patch not in native.start_up()] == list(hooks.COMMAND_LINE)
    patched.entry_points = lambda group: []
    assert list(native.start_up()) == list(hooks.START_UP), "not installed as a package: Megatron does not ask it"
