"""Train with Bridge's own loop on forked CPU ranks, and record what it computed; data to fine-tune on."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
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
    arguments: Mapping[str, Any] | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    change: Callable[[Any], None] | None = None,
    prepare: Callable[[], None] | None = None,
    events: Mapping[str, Callable[[Any], None]] | None = None,
    steps: int = 3,
) -> list[Record]:
    """Train on ``ranks`` forked processes, and return every rank's record.

    arguments: of ``apply``; with them all ranks are context-parallel, unless the model says otherwise.
    model: fields of ``config.model``.
    change: further changes of the config, before ``apply``.
    prepare: called on every rank between ``apply`` and the training, to plant faults.
    events: name of a callback of Bridge's loop -> what is called with its context.
    """

    def rank() -> Record:
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain

        from cp_plugin import nemo

        logging.disable(logging.WARNING)
        config, record = recipe({"context_parallel_size": ranks if arguments else 1, **(model or {})}, steps), Record()
        if change is not None:
            change(config)
        nemo.apply(config, **(arguments or {}))
        if prepare is not None:
            prepare()
        pretrain(config, forward_step, [_callback(_record_into(record)), _callback(events or {})])
        return record

    return run_ranks(rank, ranks, timeout=180.0)


@cache
def one_rank() -> Record:
    """The same training on one rank, without the plugin."""
    return train(1)[0]


LOSS, GRAD = 1e-5, 1e-4


def check_same(records: Sequence[Record], reference: Record, steps: int = 3) -> None:
    """Every rank's losses, and gradients of the first step, are those of the reference."""
    for record in records:
        assert len(record.losses) == steps
        assert record.losses == pytest.approx(reference.losses, rel=LOSS)
        assert record.grads.keys() == reference.grads.keys()
        for key, grad in reference.grads.items():
            assert torch.linalg.norm(record.grads[key] - grad) <= GRAD * torch.linalg.norm(grad), key


def _callback(events: Mapping[str, Callable[[Any], None]]) -> Any:
    from megatron.bridge.training.callbacks import Callback

    methods = {name: lambda self, context, call=call: call(context) for name, call in events.items()}
    return type("Events", (Callback,), methods)()  # Bridge looks for bound methods


def _record_into(record: Record) -> dict[str, Callable[[Any], None]]:
    def record_step(context: Any) -> None:
        if "lm loss" in context.loss_dict:
            record.losses.append(float(context.loss_dict["lm loss"]))
        if not record.grads:
            named = [pair for chunk in context.model for pair in chunk.named_parameters()]
            record.grads = {name: p.main_grad.detach().clone() for name, p in named if p.requires_grad}

    def record_evaluation(context: Any) -> None:
        record.eval_losses.append(float(context.total_loss_dict["lm loss"]))

    return {"on_train_step_end": record_step, "on_eval_end": record_evaluation}


EXAMPLES, WORDS = 24, 127
"""Fine-tuning data: words are numbers, tokens are the same numbers."""


def write(folder: Path) -> Path:
    """Write the tokenizer and examples of 9 to 40 tokens, about half of them the masked prompt; returns the folder."""
    tokenizer().save_pretrained(folder)
    random.seed(5)
    lines = []
    for _ in range(EXAMPLES):
        prompt, answer = (" ".join(str(random.randrange(1, 120)) for _ in range(random.randint(4, 20))) for _ in "pa")
        lines.append(json.dumps({"input": prompt, "output": answer}))
    folder.joinpath("training.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tokenizer() -> Any:
    """A transformers tokenizer of ``WORDS`` numbers and an end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(WORDS)} | {"<end>": WORDS}
    by_word = Tokenizer(models.WordLevel(words, unk_token="0"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_word, eos_token="<end>", pad_token="<end>")


def use_examples(config: Any, folder: Path, *, packed: int = 0, pad_each_to: int = 1) -> None:
    """Put Bridge's fine-tuning dataset into a config.

    packed: the tokens of a pack; 0: an example is a sequence.
    pad_each_to: the multiple to which every example of a pack is padded.
    """
    from megatron.bridge.data.builders import GPTSFTDatasetConfig
    from megatron.bridge.data.packing import PackedSequenceSpecs
    from megatron.bridge.training.config import TokenizerConfig

    specs = PackedSequenceSpecs(packed_sequence_size=packed, pad_seq_to_mult=pad_each_to, num_tokenizer_workers=1)
    config.dataset = GPTSFTDatasetConfig(
        seq_length=config.model.seq_length,
        dataset_root=folder,
        enable_offline_packing=packed > 0,
        offline_packing_specs=specs if packed else None,
        dataset_kwargs=None if packed else {"pad_to_max_length": True},
        do_validation=False,
        do_test=False,
        num_workers=0,
    )
    config.tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    if packed:
        config.train.micro_batch_size = 1
