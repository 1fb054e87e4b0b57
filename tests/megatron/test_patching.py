"""Patching: fingerprints, replacement by identity, refusals, undo."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cp_plugin.common.versions import megatron_supported
from cp_plugin.megatron.patches import digest, patching
from cp_plugin.megatron.patches import source as sources
from cp_plugin.megatron.patches.fingerprints import FINGERPRINTS
from cp_plugin.megatron.patches.patching import Patch

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
    """A module ``somelib`` that can be patched, and its fingerprints."""
    (tmp_path / "somelib.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import somelib  # type: ignore[import-not-found]

    targets = ("somelib:slow", "somelib:Provider.answer")
    known = {target: {sources.of_file(tmp_path, target): ("0.19.2",)} for target in targets}
    monkeypatch.setattr(patching, "FINGERPRINTS", {**patching.FINGERPRINTS, **known})
    patching.undo()
    yield somelib
    patching.undo()
    sys.modules.pop("somelib", None)


def _patch(target: str = "somelib:slow", make: Callable = lambda original: lambda x: original(x) * 10):
    return Patch(target=target, make=make, reason="a test")


@pytest.mark.parametrize(
    "changed",
    [
        SOURCE.replace("    # a comment\n", ""),
        SOURCE.replace('    """Documented."""\n', ""),
        SOURCE.replace('"""Documented."""', '"""Documented otherwise,\n\n    and longer."""'),
        SOURCE.replace("x + 1", "(x  +  1)"),
        SOURCE.replace("class Provider", "UNRELATED = 3\n\n\nclass Provider"),
    ],
)
def test_fingerprint_ignores_comments_docstrings_and_formatting(tmp_path: Path, changed: str) -> None:
    assert changed != SOURCE
    assert _digest(tmp_path, "a", changed) == _digest(tmp_path, "b", SOURCE)


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("x: int)", "x: float)"), ("slow(x: int)", "slow(x: int = 1)"), ("+", "-")]
)
def test_fingerprint_sees_code(tmp_path: Path, old: str, new: str) -> None:
    assert _digest(tmp_path, "a", SOURCE.replace(old, new)) != _digest(tmp_path, "b", SOURCE)


def _digest(tmp_path: Path, name: str, source: str) -> str:
    (tmp_path / f"{name}.py").write_text(source)
    return sources.of_file(tmp_path, f"{name}:slow")


def test_every_patched_symbol_of_the_installed_megatron_is_known(adapter: None) -> None:
    patching.undo()
    root = Path(inspect.getfile(sys.modules["megatron.core.package_info"])).parents[2]
    here = patching.megatron_version()
    for target in [target for target, has in digest.targets().items() if has is None or has(here)]:
        written = sources.of_file(root, target)
        assert here in FINGERPRINTS[target][written]
        if target != digest.OF_BRIDGE:  # no class without Transformer Engine
            assert sources.of_object(patching.original(target)) == written, "read from the object and from the file"


def test_the_table_names_every_supported_minor_version(adapter: None) -> None:
    targets = digest.targets()
    assert list(FINGERPRINTS) == list(targets)
    for target, digests in FINGERPRINTS.items():
        versions = [version for listed in digests.values() for version in listed]
        released = [version for version in versions if version != "0.20.0"]  # several commits of which are known
        assert len(released) == len(set(released)), target
        assert all(len(listed) == len(set(listed)) for listed in digests.values()), target
        having = {
            minor for minor in ("0.17", "0.18", "0.19", "0.20") if (has := targets[target]) is None or has(f"{minor}.0")
        }
        assert {version.rpartition(".")[0] for version in versions} == having, target
        assert all(map(megatron_supported, versions))


def _held_by_megatron() -> set[str]:
    """Every name in Megatron's modules and classes that refers to a function or class of the plugin."""
    found = set()
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron" and module}
    for name, module in modules.items():
        classes = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == name}
        for prefix, owner in (("", module), *((f"{k}.", v) for k, v in classes.items())):
            for attribute, value in list(vars(owner).items()):
                value = value.__func__ if isinstance(value, staticmethod) else value
                code = getattr(value, "__code__", None)
                file = code.co_filename if code is not None else str(getattr(value, "__module__", "")).replace(".", "/")
                if "cp_plugin/" in file and "cuda_surface" not in file:  # which is about torch
                    found.add(f"{name}:{prefix}{attribute}")
    return found


def test_nothing_of_megatrons_is_replaced_outside_of_the_table(validated: Callable[..., object]) -> None:
    """In the modules that a training has imported once flags that need every kind of patch are validated."""
    validated("--context-parallel-size 4 --cp-provider ring --cp-linear-attention gla --cp-layer-pattern LN")
    held = _held_by_megatron()
    own = {target for scope in ("run", "process") for target in patching.installed(scope)}
    assert len(own) >= 20 and own <= FINGERPRINTS.keys()
    assert own <= held, own - held
    names = {target.rpartition(":")[2] for target in own}
    assert {place for place in held if place.rpartition(":")[2] not in names} == set()


def _assigned_in_megatron(source: str) -> list[str]:
    """The lines of a source file that set an attribute of a module or class that it imports from Megatron."""
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "megatron"
    }

    def of_megatron(node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del(), value=owner) if of_megatron(owner):
                found.append(ast.unparse(node))
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]) if of_megatron(owner):
                found.append(ast.unparse(node))
    return found


def test_no_source_file_sets_an_attribute_of_megatrons() -> None:
    assert _assigned_in_megatron("from megatron.core import utils\nutils.f = 1\nsetattr(utils.C, 'g', 2)") == [
        "utils.f",
        "setattr(utils.C, 'g', 2)",
    ]
    package = Path(__file__).parents[2] / "cp_plugin"
    found = {path.name: _assigned_in_megatron(path.read_text()) for path in package.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


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


def test_a_method_is_replaced_on_its_class(library: types.ModuleType) -> None:
    provider = library.Provider()
    patching.install([_patch("somelib:Provider.answer", lambda original: lambda self: original(self) + 41)])
    assert provider.answer() == 42
    patching.undo()
    assert provider.answer() == 1


def test_an_unknown_source_is_refused_and_nothing_is_replaced(
    library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(patching.FINGERPRINTS, "somelib:Provider.answer", {"0" * 16: ("0.18.0", "0.19.2")})
    version = patching.megatron_version()
    with pytest.raises(
        ValueError, match=rf"somelib:Provider.answer of megatron-core {version}.*known for 0.18.0, 0.19.2"
    ):
        patching.install([_patch(), _patch("somelib:Provider.answer")])
    assert library.slow(1) == 2
    assert patching.installed() == []


def test_a_symbol_that_another_extension_replaced_is_refused(library: types.ModuleType) -> None:
    original = library.slow

    @functools.wraps(original)
    def somebody_elses(x: int) -> int:
        return original(x) - 1

    library.slow = somebody_elses
    with pytest.raises(ValueError, match="another extension"):
        patching.install([_patch()])


@pytest.mark.parametrize("version", ["0.16.1", "0.21.0", "0.21.0rc1", "1.0.0"])
def test_a_megatron_outside_the_range_is_refused(adapter: None, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from megatron.core import package_info

    from cp_plugin.megatron import activate

    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(ValueError, match=rf"megatron-core {version} is not supported: .*>=0.17,<0.21"):
        activate(["--cp-device", "cpu"])


def test_activation_is_repeatable_and_leaves_training_alone(adapter: None) -> None:
    from megatron.core import utils
    from megatron.core.models import backends
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from cp_plugin.megatron import activate
    from cp_plugin.megatron.patches import hooks, patching

    before = patching.installed()
    activate(["--cp-device", "cpu"])
    assert patching.installed() == before == [patch.target for patch in hooks.START_UP]
    assert utils.get_batch_on_this_cp_rank.__module__ == "megatron.core.utils"
    assert not hasattr(utils.get_batch_on_this_cp_rank, "__wrapped__")
    assert backends.LocalSpecProvider().core_attention() is DotProductAttention
