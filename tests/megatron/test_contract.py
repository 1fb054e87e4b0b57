"""Loss functions of scripts: right however unevenly unmasked tokens lie on the ranks, or refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import SGD, train
from nightly import one_case
from parity import check
from test_known_bugs import mask_the_first_half
from torch import Tensor

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.patches.loss import _wrong_report, _wrong_weights
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

ZIGZAG = "--cp-provider ring --cp-layout zigzag"
documents_are_packed = pytest.mark.skipif(
    version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"
)
CONTIGUOUS = "--cp-provider ring --cp-layout contiguous"


def _count_a_quarter() -> None:
    """Only the last tokens of a sequence count: all in the second chunk of rank 0 of the zigzag layout."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    get = MockGPTDataset.__getitem__

    def last(self: Any, index: int | None) -> dict[str, Any]:
        found = get(self, index)
        found["loss_mask"] = found["loss_mask"].clone()
        found["loss_mask"][: 3 * found["loss_mask"].numel() // 4 - 3] = 0
        return found

    MockGPTDataset.__getitem__ = last


@one_case
@pytest.mark.parametrize("prediction", ["", "--mtp-num-layers 1"])
def test_megatron_7513_means_over_the_tokens_of_all_ranks(prediction: str) -> None:
    """The mean of the ranks' means gave three tokens on one rank the weight of sixteen on the other."""
    check(prediction, ZIGZAG, cp=2, steps=1, prepare=_count_a_quarter, alone=_count_a_quarter)


def _no_documents_on_the_second_stage() -> None:
    """The second stage embeds no tokens and gets no document bounds either."""
    from megatron.core import parallel_state

    from cp_plugin.megatron.models import gpt

    packed = gpt._packed_seq_params

    def wrong(batch: Any) -> Any:
        return None if parallel_state.get_pipeline_model_parallel_rank() == 1 else packed(batch)

    gpt._packed_seq_params = wrong


@documents_are_packed
def test_bridge_2952_documents_on_every_pipeline_stage() -> None:
    """Later stages attended to the whole pack, and benchmarks fell by 10 to 20 points."""
    flags = "--dataloader-inter-document-masking --pipeline-model-parallel-size 2 --micro-batch-size 1"
    with pytest.raises(RankError, match="layer 2 was called without packed_seq_params, though the flags pack"):
        train(4, f"{flags} --context-parallel-size 2 {CONTIGUOUS}", prepare=_no_documents_on_the_second_stage)


def _loss(make: Callable[[Tensor, Tensor, Any], Any]) -> Callable[[], None]:
    """Plant a loss function that returns ``make(sum, tokens, report)``."""

    def plant() -> None:
        from cp_plugin.megatron.models import gpt

        loss = gpt.loss
        gpt.loss = lambda mask, output: make(*loss(mask, output))

    return plant


def _over_all(x: Tensor) -> Tensor:
    from megatron.core import parallel_state

    x = x.clone()
    dist.all_reduce(x, group=parallel_state.get_context_parallel_group())
    return x


def _pair(total: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([total.detach(), tokens.to(total.dtype)])


WRONG = {
    "a mean": (lambda total, tokens, report: (total / tokens, tokens, report), "returns a mean instead", CONTIGUOUS),
    "a mean over the tokens of all ranks": (
        lambda total, tokens, report: (total / _over_all(tokens), tokens, report),
        "returns a mean instead",
        CONTIGUOUS,
    ),
    "a count of all ranks": (
        lambda total, tokens, report: (total, _over_all(tokens), report),
        "counts all ranks' tokens on every rank: 256 together, of 128",
        ZIGZAG,
    ),
    "a sum over all ranks": (
        lambda total, tokens, report: (2 * total, tokens, report),
        "sums all ranks' losses on every rank: 256 together, of 128",
        ZIGZAG,
    ),
    "two parts, a mean of this rank": (
        lambda total, tokens, report: (total / tokens, report),
        "returns two parts, with the mean over this rank's own tokens",
        ZIGZAG,
    ),
    "a report of all ranks' sum": (
        lambda total, tokens, report: (total, tokens, {"lm loss": _pair(_over_all(total), tokens)}),
        "reports 'lm loss' as the sum over all ranks with this rank's own count: 2 times the loss",
        CONTIGUOUS,
    ),
    "a report of all ranks' count": (
        lambda total, tokens, report: (total, tokens, report | {"loss": _pair(total, _over_all(tokens))}),
        "reports 'loss' as this rank's own sum with the count of all ranks: 1/2 of the loss",
        CONTIGUOUS,
    ),
    "a report of this rank": (
        lambda total, tokens, report: (total, tokens, {"lm loss": total.detach() / tokens}),
        "reports 'lm loss' as one number, of this rank's tokens alone",
        ZIGZAG,
    ),
}


@one_case
@pytest.mark.parametrize("name", WRONG)
def test_bridge_2055_verl_6609_other_counts_are_refused(name: str) -> None:
    """Losses were too large, or too small, by the number of ranks."""
    make, says, provider = WRONG[name]
    with pytest.raises(RankError, match=f"the loss function of this script {says}"):
        train(2, f"--context-parallel-size 2 {provider}", prepare=_loss(make))


def test_megatron_673_two_parts_over_the_tokens_of_all_ranks() -> None:
    """As Megatron's own scripts returned it: scaled by the number of ranks, and then averaged over them."""
    right = _loss(lambda total, tokens, report: (total / _over_all(tokens), report))
    check("", ZIGZAG, cp=2, steps=1, prepare=right, alone=right)


@pytest.mark.parametrize(
    ("weights", "counts", "says"),
    [
        ([64.0, 64.0], [64.0, 64.0], ""),
        ([40.0, 0.0], [40.0, 0.0], ""),
        ([0.0, 0.0], [0.0, 0.0], ""),
        ([0.0, 0.0], [64.0, 64.0], ""),  # a loss of logits
        ([33.1, -7.0], [64.0, 64.0], ""),  # of something else than tokens
        ([1.0, 1.0], [1.0, 1.0], ""),
        ([1.0, 0.0], [40.0, 0.0], "a mean"),
        ([0.25, 0.75], [16.0, 48.0], "a mean"),
        ([0.25, 0.75], None, ""),
        ([1.0, 0.0], None, ""),  # cannot be told apart
        ([1.0, 1.0, 0.0], None, "this rank's own tokens"),
        ([64.0, 32.0], [96.0, 96.0], "all ranks' tokens"),
    ],
)
def test_weights_of_tokens(weights: list[float], counts: list[float] | None, says: str) -> None:
    found = _wrong_weights(weights, counts)
    assert says in found and bool(says) == bool(found)


@pytest.mark.parametrize(
    ("losses", "counts", "report", "says"),
    [
        ([8.0, 2.0], [4.0, 1.0], ([8.0, 2.0], [4.0, 1.0]), ""),
        ([8.0, 2.0], [4.0, 1.0], ([10.0, 10.0], [5.0, 5.0]), ""),  # both over all ranks
        ([8.0, 8.0], [4.0, 4.0], ([8.0, 8.0], [4.0, 4.0]), ""),
        ([8.0, 0.0], [4.0, 0.0], ([8.0, 0.0], [4.0, 0.0]), ""),
        ([8.0, 3.0], [4.0, 1.0], ([10.0, 2.0], [4.0, 4.0]), ""),  # something else
        ([8.0, 3.0], [4.0, 1.0], ([0.4, 0.1], None), ""),
        ([8.0, 3.0], [4.0, 1.0], ([2.2, 2.2], None), ""),  # averaged by the script
        ([8.0, 8.0], [4.0, 4.0], ([2.0, 2.0], None), ""),
        ([0.0, 0.0], [0.0, 0.0], ([0.0, 0.0], [0.0, 0.0]), ""),
        ([1.5, 0.5], None, ([6.0, 2.0], [2.0, 2.0]), ""),
        ([8.0, 3.0], [4.0, 1.0], ([11.0, 11.0], [4.0, 1.0]), "2 times the loss"),
        ([8.0, 0.0], [4.0, 0.0], ([8.0, 8.0], [4.0, 0.0]), "2 times the loss"),
        ([8.0, 3.0], [4.0, 1.0], ([8.0, 3.0], [5.0, 5.0]), "1/2 of the loss"),
        ([8.0, 3.0], [4.0, 1.0], ([2.0, 3.0], [1.0, 1.0]), "2.5 for 2.2"),
        ([8.0, 3.0], [4.0, 1.0], ([2.0, 3.0], None), "of this rank's tokens alone"),
        ([1.5, 0.5], None, ([8.0, 8.0], [2.0, 2.0]), "2 times the loss"),
        ([1.5, 0.5], None, ([1.5, 0.5], None), "of this rank's tokens alone"),
    ],
)
def test_reports(
    losses: list[float], counts: list[float] | None, report: tuple[list[float], list[float] | None], says: str
) -> None:
    found = _wrong_report(losses, counts, *report)
    assert says in found and bool(says) == bool(found)


def _fine_tuning_validates(file: Path) -> None:
    """Make validation average the losses of micro-batches, as with --sft, and save the result."""
    from megatron.training import training

    evaluate, arguments = training.evaluate, training.get_args

    def as_fine_tuning(*positional: Any, **named: Any) -> Any:
        training.get_args = lambda: Namespace(**(vars(arguments()) | {"sft": True}))
        try:
            found = evaluate(*positional, **named)
        finally:
            training.get_args = arguments
        file.write_text(str(found[0]["lm loss"].item()))
        return found

    training.evaluate = as_fine_tuning
    mask_the_first_half()


def test_validation_of_fine_tuning_is_that_of_one_rank(tmp_path: Path) -> None:
    """Megatron's mean of means takes a rank without unmasked tokens for one with a loss of zero."""
    training = SGD.replace("--eval-iters 0 --eval-interval 1000", "--eval-iters 1 --eval-interval 1")

    def validated(ranks: int, flags: str) -> float:
        file = tmp_path / str(ranks)
        train(ranks, flags, training=training, prepare=lambda: _fine_tuning_validates(file))
        return float(file.read_text())

    alone = validated(1, "--calculate-per-token-loss")
    assert validated(2, f"--context-parallel-size 2 {CONTIGUOUS}") == pytest.approx(alone, rel=1e-6)
