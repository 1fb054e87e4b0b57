"""Loss functions of scripts: right however unevenly unmasked tokens lie on the ranks, or refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import one_case
from scripts import mask_the_first_half
from torch import Tensor
from training import SGD, check, train

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

ZIGZAG = "--cp-provider ring --cp-layout zigzag"
documents_are_packed = pytest.mark.skipif(
    version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"
)
CONTIGUOUS = "--cp-provider ring --cp-layout contiguous"


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


def _ranks() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_world_size()


def _pair(total: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([total.detach(), tokens.to(total.dtype)])


WRONG = {
    "a mean": (lambda total, tokens, report: (total / tokens, tokens, report), "the gradient of", CONTIGUOUS),
    "a count of all ranks": (
        lambda total, tokens, report: (total, _over_all(tokens), report),
        "the gradient of",
        ZIGZAG,
    ),
    "a sum over all ranks": (
        lambda total, tokens, report: (_ranks() * total, tokens, report),
        "the gradient of",
        ZIGZAG,
    ),
    "two parts, a mean of this rank": (
        lambda total, tokens, report: (total / tokens, report),
        "the gradient of",
        ZIGZAG,
    ),
    "a report of all ranks' sum": (
        lambda total, tokens, report: (total, tokens, {"lm loss": _pair(_over_all(total), tokens)}),
        "'lm loss': .* instead of",
        CONTIGUOUS,
    ),
    "a report of all ranks' count": (
        lambda total, tokens, report: (total, tokens, report | {"loss": _pair(total, _over_all(tokens))}),
        "'loss': .* instead of",
        CONTIGUOUS,
    ),
    "a report of this rank": (
        lambda total, tokens, report: (total, tokens, {"lm loss": total.detach() / tokens}),
        "'lm loss': .* instead of",
        ZIGZAG,
    ),
}


@one_case
@pytest.mark.parametrize("name", WRONG)
def test_bridge_2055_verl_6609_other_counts_are_refused(name: str) -> None:
    """Losses were too large, or too small, by the number of ranks."""
    make, says, provider = WRONG[name]
    with pytest.raises(RankError, match=f"differs from the step on one rank. rank .*: {says}"):
        train(2, f"--context-parallel-size 2 {provider}", prepare=_loss(make))


def test_megatron_673_two_parts_over_the_tokens_of_all_ranks() -> None:
    """As Megatron's own scripts returned it: scaled by the number of ranks, and then averaged over them."""
    right = _loss(lambda total, tokens, report: (total / _over_all(tokens), report))
    check("", ZIGZAG, cp=2, steps=1, prepare=right, alone=right)


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
