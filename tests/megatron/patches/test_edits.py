"""Edits of Megatron: harmless ones start and train as without them, harmful ones are refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import edits
import pytest
from edits import Edit
from nightly import one_case
from state_space_kernels import STATES
from training import HYBRID, Record, train

from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.testing.launch import RankError

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version())[:2] != (0, 19), reason="edits of megatron-core 0.19"),
]

EDITS = {edit.name: edit for edit in edits.read()}
HARMLESS = [name for name, edit in EDITS.items() if not edit.refusal]
HARMFUL = [name for name, edit in EDITS.items() if edit.refusal]


def test_the_lists_are_long_enough() -> None:
    assert len(EDITS) == len(edits.read()), "two edits of one name"
    assert min(len(HARMLESS), len(HARMFUL)) >= 25


@pytest.mark.parametrize("name", EDITS)
def test_the_texts_are_there_once(name: str) -> None:
    edits.texts(EDITS[name], edits.installed())


@one_case
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_edits_change_nothing(name: str, tmp_path: Path) -> None:
    edit = EDITS[name]
    off = f"{edit.flags} --cp-selfcheck off"
    want = _train(off, edit, tmp_path / "off") if edit.of_itself else _unedited(edit.flags)
    assert _losses(_train(edit.flags, edit, tmp_path)) == _losses(want)


@one_case
@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_edits_are_refused(name: str, tmp_path: Path) -> None:
    edit = EDITS[name]
    with pytest.raises(RankError) as raised:
        _train(edit.flags, edit, tmp_path)
    assert re.search(edit.refusal, str(raised.value)) is not None, str(raised.value)


def _losses(records: Sequence[Record]) -> list[list[float]]:
    return [record.losses for record in records]


@cache
def _unedited(flags: str) -> list[Record]:
    return _train(flags)


def _train(flags: str, edit: Edit | None = None, folder: Path = Path()) -> list[Record]:
    """One step on two context-parallel ranks."""
    states = STATES if HYBRID in flags else ""
    divided = any(f"--{kind}-model-parallel-size" in flags for kind in ("tensor", "pipeline"))
    before = None if edit is None else partial(_edit, edit, folder)
    return train(4 if divided else 2, f"--context-parallel-size 2 {states} {flags}", before=before)


def _edit(edit: Edit, folder: Path) -> None:
    """In a process that has the plugin activated: Megatron is edited before that."""
    from cp_plugin.megatron import activate, deactivate

    deactivate()
    edits.apply(edit, folder)
    activate(["--cp-device", "cpu"])
