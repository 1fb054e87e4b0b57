"""Every row of ``cases.toml``: with context parallelism, Megatron computes what it does without.

Some rows train a step for each supported cell of the support matrix; the other cells are refused. A row may cover
several features. Models with linear layers are compared with themselves on one rank.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from case import Case, cases
from nightly import nightly, one_case
from training import PACKED, SCRIPT, train

from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.launch import RankError

pytestmark = [pytest.mark.usefixtures("adapter"), pytest.mark.case]


MANAGED = {
    "converted": "contiguous outside attention: Megatron's layout manager converts",
    "one layout": "setting --linear-cp-layout and --attention-cp-layout to zigzag",
}


def _rows() -> list[Any]:
    marks = {"day": [], "night": [nightly]}
    versions = {True: [pytest.mark.versions], False: []}
    return [
        pytest.param(case, id=case.name, marks=[*marks[case.where[0]], *versions["versions" in case.where]])
        for case in cases()
        if case.where[0] in marks
    ]


@pytest.mark.parametrize("case", _rows())
def test_as_on_one_rank(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    from cp_plugin.megatron.patches.patching import megatron_version

    since = max(case.since, "0.19" if PACKED in case.flags else "")
    if version_tuple(megatron_version()) < version_tuple(since):
        pytest.skip(f"since megatron-core {since}")
    if case.modules and SCRIPT is not None:
        pytest.skip("they change the plugin's own script")
    manager = case.name.startswith("layout manager: ")
    if manager and find_spec("megatron.core.context_parallel") is None:
        pytest.skip("this megatron-core has no layout manager, which came to Megatron-LM with #6764 and #6776")
    got, want = case.run()
    losses = next(record.losses for record in want if record.losses)
    said = capfd.readouterr().out
    if case.sharded:
        assert losses[0] != losses[-1]
    if case.sharded or "day" in case.where:
        assert "self-check passed: a step" in said
    if manager:
        told = [how for how, text in MANAGED.items() if text in said]
        assert told == ["converted" if "converted" in case.name else "one layout"]
    if case.steps == 20:
        assert losses[-1] < 0.95 * losses[0], "it learns"
    if case.name.startswith("logged values: "):
        for one, other in zip(want[-1].logged, got[-1].logged, strict=True):
            assert len(one) >= 3 and one == pytest.approx(other, rel=2e-5)
    if case.name.startswith("prediction: "):  # Megatron reports the mean of the ranks' values
        tracked = torch.stack([record.mtp_losses[0] for record in got if record.mtp_losses]).mean(0)
        alone = next(record.mtp_losses[0] for record in want if record.mtp_losses)
        torch.testing.assert_close(tracked, alone, rtol=1e-6, atol=0)
        assert any(name.startswith("0.module.mtp.") for record in got for name in record.grads)


@nightly
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases() if "start" in case.where])
def test_starts_without_a_false_alarm(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In bfloat16, at initialisation and after 200 steps, the start-up check finds the step of one rank."""
    case.start("--bf16")
    assert capfd.readouterr().out.count("equals the step on one rank") == 1
    if "--use-megatron-fsdp" in case.flags:
        pytest.skip("after training not checked: Megatron-FSDP cannot load weights without the optimizer's state")
    case.start(f"--save {tmp_path} --save-interval 200 --no-save-optim --no-save-rng --cp-selfcheck off", steps=200)
    case.start(f"--bf16 --load {tmp_path} --no-load-optim --no-load-rng", steps=201)
    assert capfd.readouterr().out.count("equals the step on one rank") == 1


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


@one_case
@pytest.mark.parametrize("cell", [cell for cell, why in CELLS.items() if why is not None], ids=", ".join)
def test_unsupported_cells_are_refused(cell: tuple[str, str]) -> None:
    feature, provider = cell
    flags = f"--cp-linear-attention basic --cp-linear-provider {provider} {REFUSED[feature]}"
    with pytest.raises(RankError) as raised:
        train(2, f"--context-parallel-size 2 {flags}")
    assert str(CELLS[cell]) in str(raised.value), str(raised.value)[-500:]
