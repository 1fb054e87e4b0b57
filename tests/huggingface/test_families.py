"""Every family in the tables of docs/huggingface.md is trained, or refused for the reason given there."""

from __future__ import annotations

import re
from itertools import cycle
from pathlib import Path

import pytest
from tiny import differs, model_of, refusal, transformers

from cp_plugin.testing.launch import RankError

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()

NEWEST = transformers is not None and tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 20)
"""Older versions have fewer families behind AttentionInterface."""


def rows(heading: str) -> list[tuple[str, str]]:
    """The cells of a table of two columns."""
    table = PAGE.split(heading)[1].split("|---|---|\n")[1].split("\n\n")[0]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.splitlines()]  # type: ignore[misc]


TRAINED = {kind: what for what, kinds in rows("| layers |") for kind in re.findall(r"`(\w+)`", kinds)}
REFUSED = {
    kind: reason for kinds, reason in rows("| `model_type` | reason |") for kind in re.findall(r"`(\w+)`", kinds)
}


PLACES = (
    ("ring", {"layout": "zigzag"}),
    ("needed", {"layout": "contiguous"}),
    ("ulysses", {}),
    ("needed", {"layout": "documents"}),
    ("attention2d", {"layout": "zigzag"}),
    ("ring", {"layout": "contiguous"}),
)
"""In turn."""


@pytest.mark.parametrize(("place", "kind"), list(zip(cycle(PLACES), TRAINED)), ids=str)
def test_families_are_those_of_one_rank(kind: str, place: tuple[str, dict[str, str]]) -> None:
    provider, options = PLACES[0] if "documents" in place[1].values() and "convolutions" in TRAINED[kind] else place
    try:
        # Phi-MoE draws its experts in training, whatever its config says
        error = differs(model_of(kind).train(kind != "phimoe"), provider, **options)
    except (NotImplementedError, RankError) as refused:
        if NEWEST or not re.search(
            "does not get its attention|cannot be examined|models does not support|meta", str(refused)
        ):
            raise
        pytest.skip(f"transformers {transformers.__version__} has {kind} in another build: it is refused by name")
    assert error <= (1e-4 if "delta" in TRAINED[kind] else 2e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused(kind: str) -> None:
    assert REFUSED[kind] in refusal(model_of(kind))


def test_the_tables_are_read() -> None:
    assert len(TRAINED) > 50 and len(REFUSED) >= 5
