"""The registry, beside what ``tests/test_docs.py`` asks of a third party's method: refusals, and default layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import third_party

from cp_plugin import ContextParallel
from cp_plugin.methods import registry as providers
from cp_plugin.methods.registry import layout_for


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    with third_party.looked_for_anew():
        yield


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from cp_plugin.methods.ring import STRIPED as THIRD", "two context-parallel providers are called 'striped'"),
        ("THIRD = 'a ring'", "'third'.* is not a cp_plugin Provider"),
    ],
)
def test_what_cannot_be_registered(source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    third_party.install(tmp_path, "third_party_method", source, providers.ENTRY_POINTS, third="THIRD")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "third_party_method", raising=False)
    with pytest.raises(ValueError, match=said):
        providers.registry()


def test_layouts_default_to_the_providers_first() -> None:
    assert layout_for(providers.get("ring"), ContextParallel("ring").options).name == "zigzag"
    assert layout_for(providers.get("ring"), ContextParallel("ring", layout="contiguous").options).name == "contiguous"
    assert ContextParallel("striped").layout.name == "striped"
