"""Input files are data: the package never unpickles, evaluates or runs their content."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_sources import SOURCES

from cp_plugin.common import yaml_files

READERS = {"load", "loads", "Unpickler"}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
UNSAFE_CALLS = {
    *("os.system", "os.popen", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "pandas.read_pickle"),
    *("eval", "exec"),
}
YAML_LOADS = {"yaml.load", "yaml.load_all"}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "SafeLoader", "CSafeLoader"}
ALLOWED = {
    ("testing/launch.py", "pickle.load"): 1,  # from memory that only this program's forked ranks write to
    ("testing/launch.py", "torch.load"): 1,  # the result in it
    ("common/yaml_files.py", "yaml.load"): 1,  # by a loader derived from SafeLoader, see below
}


def unsafe(source: str) -> Iterator[str]:
    """The calls in a source text that could execute the content of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES:
            yield from (f"{node.module}.{name.name}" for name in node.names if name.name in READERS)
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        module, _, function = name.rpartition(".")
        if (
            (module in UNSAFE_MODULES and function in READERS | {"open"})
            or name in UNSAFE_CALLS
            or (name in YAML_LOADS and _loader(node, given) not in SAFE_LOADERS)
            or (name == "torch.load" and given.get("weights_only") != "True")
            or ("allow_pickle" in given and given["allow_pickle"] != "False")
            or given.get("shell", "False") != "False"
        ):
            yield name


def _loader(node: ast.Call, given: dict[str, str]) -> str:
    return given.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "")


def test_no_file_is_unpickled_or_run() -> None:
    assert len(SOURCES) > 100
    assert Counter((file, call) for file, source in SOURCES.items() for call in unsafe(source)) == ALLOWED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.mkdir [CANARY]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: {b: 1, b: 1}", "duplicate key b"),
        ("a: !!bool x", "does not fit its tag"),
        ("[" * 3000, "nested too deeply"),
        ("a: \0", "special characters"),
    ],
)
def test_malformed_yaml_is_refused_and_never_executed(text: str, message: str, tmp_path: Path) -> None:
    path, canary = tmp_path / "file.yaml", tmp_path / "made"
    path.write_text(text.replace("CANARY", str(canary)))
    with pytest.raises(ValueError, match=rf"^{path} is not valid YAML: .*{message}"):
        yaml_files.read(path)
    assert not canary.exists()


def test_valid_yaml_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &b {c: 1, d: 2}\ne: {<<: *b, c: 3}\n")
    assert yaml_files.read(path) == {"a": {"c": 1, "d": 2}, "e": {"c": 3, "d": 2}}
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read: No such file"):
        yaml_files.read(tmp_path / "none.yaml")
