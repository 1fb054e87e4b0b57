"""Every family in the tables of docs/huggingface.md is trained, or refused for the reason given there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny import built, config_of, differs, needs_transformers, refusal, tokens, transformers

from cp_plugin.testing.launch import RankError

pytestmark = needs_transformers
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


def installed(kind: str) -> None:
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")


@pytest.mark.parametrize("kind", TRAINED)
def test_families_are_those_of_one_rank(kind: str) -> None:
    installed(kind)
    more = {"layer_types": ["conv", "full_attention"]} if kind == "lfm2_moe" else {}
    whole = {"input_ids": tokens(), "labels": tokens()}
    try:
        # Phi-MoE draws its experts in training, whatever its config says
        model = built(config_of(kind, **more)).train(kind != "phimoe")
        error = differs(model, "ring", whole=whole, layout="zigzag")
    except (NotImplementedError, RankError) as refused:
        if NEWEST or not re.search(
            "does not get its attention|cannot be examined|models does not support|meta", str(refused)
        ):
            raise
        pytest.skip(f"transformers {transformers.__version__} has {kind} in another build: it is refused by name")
    assert error <= (1e-4 if "delta" in TRAINED[kind] else 2e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused(kind: str) -> None:
    installed(kind)
    torch.manual_seed(0)
    assert REFUSED[kind] in refusal(built(config_of(kind)))


def test_the_tables_are_read() -> None:
    assert len(TRAINED) > 50 and len(REFUSED) >= 6
