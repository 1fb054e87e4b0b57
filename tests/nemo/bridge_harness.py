"""Train with Bridge's own loop on forked CPU ranks, and record what it computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from training import Record

from cp_plugin.testing.launch import run_ranks


def recipe(model: Mapping[str, Any] | None = None, steps: int = 3) -> Any:
    """A two-layer GPT on mock data, trained by plain gradient descent."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config as bridge

    fields = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "seq_length": 64,
        "vocab_size": 128,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    no_decay = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    return bridge.ConfigContainer(
        model=GPTModelProvider(**fields | dict(model or {})),
        train=bridge.TrainingConfig(train_iters=steps, global_batch_size=4, micro_batch_size=2),
        validation=bridge.ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=bridge.OptimizerConfig(optimizer="sgd", lr=0.05, min_lr=0.0, sgd_momentum=0.0, clip_grad=0.0),
        scheduler=bridge.SchedulerConfig(lr_decay_style="constant", lr_warmup_iters=0, **no_decay),
        ddp=bridge.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dist=bridge.DistributedInitConfig(),
        dataset=bridge.MockGPTDatasetConfig(
            seq_length=64,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=bridge.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=1234),
    )


def train(
    ranks: int,
    asked: Mapping[str, Any] | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    change: Callable[[Any], None] | None = None,
    prepare: Callable[[], None] | None = None,
    callbacks: Callable[[], list[Any]] = list,
    steps: int = 3,
) -> list[Record]:
    """Train on ``ranks`` forked processes, and return every rank's record.

    asked: arguments of ``apply``.
    model: fields of ``config.model``.
    change: further changes of the config, before ``apply``.
    prepare: called on every rank between ``apply`` and the training, to plant faults.
    callbacks: further callbacks of Bridge's loop, made on every rank.
    """

    def rank() -> Record:
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from cp_plugin import nemo

        logging.disable(logging.WARNING)
        config, record = recipe(model, steps), Record()
        if change is not None:
            change(config)
        nemo.apply(config, **(asked or {}))
        if prepare is not None:
            prepare()
        pretrain(config, forward_step, [_recorder(record), *callbacks()])
        return record

    return run_ranks(rank, ranks, timeout=180.0)


@cache
def one_rank(**model: Any) -> Record:
    """The same training on one rank, without the plugin."""
    return train(1, model=model)[0]


LOSS, GRAD = 1e-5, 1e-4


def check_same(records: Sequence[Record], reference: Record, steps: int = 3) -> None:
    """Every rank's losses, and gradients of the first step, are those of the reference."""
    for record in records:
        assert len(record.losses) == steps
        assert record.losses == pytest.approx(reference.losses, rel=LOSS)
        assert record.grads.keys() == reference.grads.keys()
        for key, grad in reference.grads.items():
            assert torch.linalg.norm(record.grads[key] - grad) <= GRAD * torch.linalg.norm(grad), key


def _recorder(record: Record) -> Any:
    from megatron.bridge.training.callbacks import Callback

    class Recorder(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if "lm loss" in context.loss_dict:
                record.losses.append(float(context.loss_dict["lm loss"]))
            if not record.grads:
                named = [pair for chunk in context.model for pair in chunk.named_parameters()]
                record.grads = {name: p.main_grad.detach().clone() for name, p in named if p.requires_grad}

        def on_eval_end(self, context: Any) -> None:
            record.eval_losses.append(float(context.total_loss_dict["lm loss"]))

    return Recorder()
