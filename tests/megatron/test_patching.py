"""Patching: known sources, contracts of others, replacement by identity, refusals, undo."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cp_plugin.common.versions import megatron_supported
from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import difference, digest, patching
from cp_plugin.megatron.patches import source as sources
from cp_plugin.megatron.patches.contract import Contract, replaces, wraps
from cp_plugin.megatron.patches.fingerprints import FINGERPRINTS
from cp_plugin.megatron.patches.patching import Patch
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


def _patch(
    target: str = "somelib:slow",
    make: Callable = lambda original: lambda x: original(x) * 10,
    contract: Contract = wraps(),  # noqa: B008  (frozen)
    **more: Any,
) -> Patch:
    return Patch(target=target, make=make, reason="a test", contract=contract, **more)


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
    for target in [target for target in digest.targets() if compat.has(target)]:
        written = sources.of_file(root, next(place for place in compat.places(target) if _in_tree(root, place)))
        assert here in FINGERPRINTS[target][written]
        if "TEDotProductAttention" not in target:  # no class without Transformer Engine
            assert sources.of_object(patching.original(target)) == written, "read from the object and from the file"


def _in_tree(root: Path, target: str) -> bool:
    try:
        sources.in_file(root, target)
    except ValueError:
        return False
    return True


def test_the_table_has_the_supported_versions() -> None:
    assert list(FINGERPRINTS) == digest.targets()
    for digests in FINGERPRINTS.values():
        versions = [version for listed in digests.values() for version in listed]
        assert all(map(megatron_supported, versions))


def test_the_tool_loses_nothing_that_is_known(tmp_path: Path) -> None:
    """Neither versions of which no tree is at hand, nor their lines."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 3\nPRE_RELEASE = ''\n")
    (core / "some.py").write_text(SOURCE)
    old = {"versions": ["0.18.1"], "lines": "abcde"}
    known = {"megatron.core.some:slow": {"0" * 16: old}, "megatron.core.gone:old": {"1" * 16: old}}
    found = digest.added(known, [tmp_path], ["megatron.core.some:slow", "megatron.core.other:new"])
    new = sources.of_file(tmp_path, "megatron.core.some:slow")
    assert found["megatron.core.some:slow"]["0" * 16] == old
    assert found["megatron.core.some:slow"][new]["versions"] == ["0.19.3"]
    assert found.keys() == {"megatron.core.some:slow", "megatron.core.other:new"}


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
    assert len(own) >= 15 and own <= FINGERPRINTS.keys()
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


@pytest.fixture
def unknown(library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The library, whose sources nobody has compared."""
    for target in ("somelib:slow", "somelib:Provider.answer"):
        monkeypatch.setitem(patching.FINGERPRINTS, target, {"0" * 16: ("0.18.0", "0.19.2")})
    return library


def test_an_unknown_source_starts_if_its_contract_holds(
    unknown: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    patching.install([_patch(contract=wraps("x")), _patch("somelib:Provider.answer", lambda original: original)])
    assert unknown.slow(1) == 20
    patching.tell_unknown()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cp_plugin: 2 functions of this megatron-core") and line.endswith(": slow, Provider.answer")
    patching.undo()
    assert STATE.unknown == []


def test_all_broken_contracts_are_named_and_nothing_is_replaced(unknown: types.ModuleType) -> None:
    bad = [
        _patch(contract=wraps("batch", "group"), otherwise="ranks would keep other tokens"),
        _patch(
            "somelib:Provider.answer", lambda original: original, replaces(probe=lambda a, b: "it answers 1, not 2")
        ),
        _patch("somelib:gone", lambda original: original),
    ]
    with pytest.raises(ValueError, match="cannot run on this megatron-core") as error:
        patching.install(bad)
    message = str(error.value)
    for part in (
        "somelib:slow (a test): it has no parameter batch, group.",
        "If it ran, ranks would keep other tokens.",
        "somelib:Provider.answer (a test): it answers 1, not 2.",
        "gone is not in somelib",
        "--cp-provider upstream",
    ):
        assert part in message
    assert unknown.slow(1) == 2
    assert patching.installed() == []


def test_an_unknown_source_is_refused_where_the_flag_asks_for_it(
    unknown: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STATE, "strict", True)
    with pytest.raises(ValueError, match="--cp-unknown-source stop forbids"):
        patching.install([_patch()])


def test_what_only_packs_need_stops_packs_only(unknown: types.ModuleType) -> None:
    patching.install([_patch(contract=wraps("batch"), late=True), _patch("somelib:gone", late=True)])
    assert patching.installed() == [] and unknown.slow(1) == 2
    with pytest.raises(ValueError, match=r"(?s)this batch has packed documents.*somelib:slow"):
        patching.allow_packs()
    patching.undo()
    patching.allow_packs()


def test_a_symbol_that_is_not_in_every_version_may_be_absent(library: types.ModuleType) -> None:
    patching.install([_patch("somelib:gone", required=False), _patch("somelib.nowhere:gone", required=False)])
    assert patching.installed() == []


def test_a_probe_runs_on_the_first_rank_only(unknown: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = _patch(contract=wraps(probe=lambda original, replacement: "other"))
    monkeypatch.setenv("RANK", "1")
    assert patching.examine(patch).state == "checked"
    monkeypatch.setenv("RANK", "0")
    assert patching.examine(patch).broken == "other"


def test_a_probe_that_fails_breaks_the_contract(unknown: types.ModuleType) -> None:
    found = patching.examine(_patch(contract=replaces("x", probe=lambda original, replacement: 1 / 0)))
    assert found.broken == "its probe failed with ZeroDivisionError: division by zero"
    assert "no probe" in str(patching.examine(_patch(contract=replaces("x", probe=None))).broken)


def test_a_parameter_that_a_later_version_adds(unknown: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a function that is replaced: its default is what the replacement does; other values are refused."""

    def slow(x: int, y: int = 3, *, mode: str = "plain") -> int:
        return x + y

    def required(x: int, y: int) -> int:
        return x + y

    contract = replaces("x", probe=lambda original, replacement: None)
    monkeypatch.setattr(unknown, "slow", slow)
    patching.install([_patch(contract=contract)])
    assert unknown.slow(1) == unknown.slow(1, mode="plain") == unknown.slow(1, y=3) == 40
    with pytest.raises(ValueError, match="somelib:slow was called with mode='other', a parameter that this Megatron"):
        unknown.slow(1, mode="other")
    patching.undo()
    monkeypatch.setattr(unknown, "slow", required)
    assert "it requires y" in str(patching.examine(_patch(contract=contract)).broken)


def test_a_difference_shows_new_lines_and_counts_those_that_are_gone() -> None:
    def tree(text: str) -> ast.AST:
        return ast.parse(text).body[0]

    old = "def f(x):\n    a = 1\n    b = 2\n    c = 3\n    return a + b + c + x\n"
    new = old.replace("    b = 2\n", "    b = 5  # another\n")
    known = {
        "k" * 16: {"versions": ["0.18.0", "0.19.2"], "lines": difference.hashes(tree(old))},
        "l" * 16: {"versions": ["0.18.1"], "lines": difference.hashes(tree("def f():\n    pass\n"))},
    }
    shown = difference.from_nearest("m:f", tree(new), known)
    assert shown.splitlines() == [
        "--- megatron-core 0.19.2",
        "+++ m:f",
        "@@ line 1 of 5 @@",
        "  def f(x):",
        "      a = 1",
        "- (1 line of megatron-core 0.19.2)",
        "+     b = 5",
        "      c = 3",
        "      return a + b + c + x",
    ]


def test_a_symbol_that_another_extension_replaced_is_wrapped_in_turn(library: types.ModuleType) -> None:
    original = library.slow

    @functools.wraps(original)
    def somebody_elses(x: int) -> int:
        return original(x) - 1

    library.slow = somebody_elses
    patching.install([_patch(contract=wraps("x"))])
    assert library.slow(1) == 10 and STATE.unknown == ["somelib:slow"]
    patching.undo()
    changed = replaces("x", probe=lambda a, b: None if a(1) == 2 else "another value")
    with pytest.raises(ValueError, match="another value"):
        patching.install([_patch(contract=changed)])


@pytest.mark.parametrize("version", ["0.17.1", "0.21.0", "0.21.0rc1", "1.0.0"])
def test_a_megatron_outside_the_range_is_refused(adapter: None, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from megatron.core import package_info

    from cp_plugin.megatron import activate

    monkeypatch.setattr(package_info, "__version__", version)
    with pytest.raises(ValueError, match=rf"megatron-core {version} is not supported: .*>=0.18,<0.21"):
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
