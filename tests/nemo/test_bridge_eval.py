"""Evaluation during training with context-parallel groups of another size (Bridge's rebinding)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from bridge_harness import Record, train

pytestmark = pytest.mark.usefixtures("bridge")


def _with_evaluation(config: Any) -> None:
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.train.train_iters = 4


def _evaluating(size: int) -> Callable[[], list[Any]]:
    """A callback that evaluates with context-parallel groups of this size."""

    def callbacks() -> list[Any]:
        import torch.distributed as dist
        from megatron.bridge.training.callbacks import Callback
        from megatron.bridge.training.eval_context_parallel_rebinding import install_pg_collection
        from megatron.bridge.training.utils.pg_utils import get_pg_collection

        class Evaluation(Callback):
            def on_data_init_start(self, context: Any) -> None:
                self.train = get_pg_collection(context.model)
                self.eval = copy.copy(self.train)
                ranks, me = dist.get_world_size(), dist.get_rank()
                self.eval.cp = dist.new_subgroups(size)[0]
                across = [list(range(first, ranks, size)) for first in range(size)]
                self.eval.dp = dist.new_subgroups_by_enumeration(across)[0]
                context.state._eval_pgs = self.eval
                assert me in dist.get_process_group_ranks(self.eval.cp)

            def on_eval_start(self, context: Any) -> None:
                install_pg_collection(context.model, self.eval)

            def on_eval_end(self, context: Any) -> None:
                install_pg_collection(context.model, self.train)

        return [Evaluation()]

    return callbacks


@cache
def _reference(data_parallel: int) -> Record:
    """The same training and evaluation without the plugin; Bridge's validation data depends on this size."""
    return train(data_parallel, change=_with_evaluation)[0]


@pytest.mark.parametrize(("ranks", "train_size", "eval_size"), [(2, 2, 2), (2, 2, 1), (4, 2, 4)])
def test_training_goes_on(ranks: int, train_size: int, eval_size: int) -> None:
    model = {"context_parallel_size": train_size}
    change, callbacks = _with_evaluation, _evaluating(eval_size)
    reference = _reference(ranks // eval_size)
    assert len(reference.eval_losses) >= 2 and len(reference.losses) == 4
    for record in train(ranks, {"provider": "striped"}, model=model, change=change, callbacks=callbacks):
        assert record.losses == pytest.approx(reference.losses, rel=1e-5)
        assert record.eval_losses == pytest.approx(reference.eval_losses, rel=1e-5)
