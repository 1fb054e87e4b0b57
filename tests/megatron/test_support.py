"""The support matrix: ``cases.toml`` trains a step for each supported cell; the others are refused.

A run may cover several features. Models with linear layers are compared with themselves on one rank.
"""

from __future__ import annotations

import pytest
import support
from case import cases
from nightly import one_case
from training import PACKED, train

from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import RankError

CELLS = {(feature.name, name): why for feature in support.FEATURES for name, why in support.cells(feature).items()}
REFUSED = {
    "sliding window": "--window-size 20,0",
    "softmax offset (sink)": "--softmax-type learnable",
    "packed documents": PACKED,
    "values of another size (MLA)": "--multi-latent-attention --kv-lora-rank 16",
}


def test_every_supported_cell_is_trained_and_every_provider_by_day() -> None:
    by = {case: case.by.removeprefix("--cp-linear-provider ").split()[0] for case in cases() if case.proves}
    assert {(what, by[case]) for case in by for what in case.proves} == {x for x, why in CELLS.items() if why is None}
    assert {by[case] for case in by if "day" in case.where} == {*providers.registry()}


@pytest.mark.usefixtures("adapter")
@one_case
@pytest.mark.parametrize("cell", [cell for cell, why in CELLS.items() if why is not None], ids=", ".join)
def test_unsupported_cells_are_refused(cell: tuple[str, str]) -> None:
    feature, provider = cell
    flags = f"--cp-linear-attention basic --cp-linear-provider {provider} {REFUSED[feature]}"
    with pytest.raises(RankError) as raised:
        train(2, f"--context-parallel-size 2 {flags}")
    assert str(CELLS[cell]) in str(raised.value), str(raised.value)[-500:]
