"""Input files are data: never unpickled, evaluated or run, which ruff holds (S in pyproject.toml) but for these."""

from __future__ import annotations

from pathlib import Path

import pytest
from package_sources import SOURCES

from cp_plugin.engine.common import yaml_files


def test_what_ruff_does_not_look_at() -> None:
    unsafe = ("weights_only=False", "allow_pickle=True", "yaml.unsafe_load", "yaml.full_load", "cloudpickle", "joblib")
    files = {file for file, source in SOURCES.items() if any(call in source for call in unsafe)}
    assert files == {"testing/launch.py"}, "which reads memory that only its forked ranks write to"


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
