"""The plugin's own code reads data from files, and never makes objects or runs code of what stands in one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cp_plugin
from cp_plugin.core import yaml_files

PACKAGE = Path(cp_plugin.__file__).parent
READERS = {"load", "loads", "Unpickler"}
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
UNSAFE_CALLS = {
    "os.system",
    "os.popen",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "pandas.read_pickle",
}
YAML_LOADS = {"yaml.load", "yaml.load_all"}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader", "SafeLoader", "CSafeLoader"}
ALLOWED = {
    ("testing/launch.py", "pickle.load"): 1,  # what this program's own forked ranks left in the memory it gave them
    ("testing/launch.py", "pickle.loads"): 1,  # and the result in it
    ("core/yaml_files.py", "yaml.load"): 1,  # with a loader derived from SafeLoader, see below
}


def unsafe(source: str) -> Iterator[str]:
    """The calls in a Python text that could run what a file says."""
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
            or name in ("eval", "exec")
            or (name in YAML_LOADS and _loader(node, given) not in SAFE_LOADERS)
            or (name == "torch.load" and given.get("weights_only") != "True")
            or ("allow_pickle" in given and given["allow_pickle"] != "False")
            or given.get("shell", "False") != "False"
        ):
            yield name


def _loader(node: ast.Call, given: dict[str, str]) -> str:
    return given.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "")


def test_no_file_is_unpickled_or_run() -> None:
    found: dict[tuple[str, str], int] = {}
    files = sorted(PACKAGE.rglob("*.py"))
    for path in files:
        for call in unsafe(path.read_text(encoding="utf-8")):
            key = (str(path.relative_to(PACKAGE)), call)
            found[key] = found.get(key, 0) + 1
    assert len(files) > 100 and found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        *("pickle.load(f)", "pickle.loads(b)", "pickle.Unpickler(f)", "from pickle import loads", "shelve.open(p)"),
        *("torch.load(p)", "torch.load(p, weights_only=False)", "numpy.load(p, allow_pickle=True)"),
        *("yaml.load(t)", "yaml.load(t, yaml.Loader)", "yaml.load(t, Loader=yaml.FullLoader)", "yaml.unsafe_load(t)"),
        *("eval(t)", "exec(t)", "os.system(t)", "subprocess.run(t, shell=True)"),
    ],
)
def test_what_is_unsafe_is_found(line: str) -> None:
    assert list(unsafe(line))


@pytest.mark.parametrize(
    "line",
    [
        *("pickle.dumps(x)", "torch.load(p, weights_only=True)", "yaml.safe_load(t)", "model.eval()"),
        *("yaml.load(t, Loader=yaml.SafeLoader)", "numpy.load(p)", "subprocess.run(words)", "json.loads(t)"),
    ],
)
def test_what_is_safe_is_not(line: str) -> None:
    assert not list(unsafe(line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: !!python/object/apply:os.mkdir [CANARY]", "could not determine a constructor"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: 1\nb: 2\na: 3", "a is there twice"),
        ("a: {b: 1, b: 1}", "b is there twice"),
        ("a: !!bool x", "does not fit its tag"),
        ("a: !!timestamp x", "does not fit its tag"),
        ("a: 2001-99-99", "month must be in"),
        ("[" * 3000, "nested too deeply"),
        ("? [a]\n: 1", "unhashable key"),
        ("a: \0", "special characters"),
    ],
)
def test_yaml_is_data_and_says_everything_once(text: str, message: str, tmp_path: Path) -> None:
    path, canary = tmp_path / "file.yaml", tmp_path / "made"
    path.write_text(text.replace("CANARY", str(canary)))
    with pytest.raises(ValueError, match=rf"^{path} is not valid YAML: .*{message}"):
        yaml_files.read(path)
    assert not canary.exists()


def test_yaml_that_is_right(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &b {c: 1, d: 2}\ne: {<<: *b, c: 3}\n")
    assert yaml_files.read(path) == {"a": {"c": 1, "d": 2}, "e": {"c": 3, "d": 2}}
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read: No such file"):
        yaml_files.read(tmp_path / "none.yaml")
