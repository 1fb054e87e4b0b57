"""Pretrain Bridge's plain GPT recipe, with context-parallel attention of cp_plugin.

torchrun --nproc-per-node 8 examples/nemo/pretrain.py --context-parallel-size 8 --provider auto
python examples/nemo/pretrain.py --nproc 2 --small --steps 5 --context-parallel-size 2 --provider striped   # CPU ranks
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cp_plugin import nemo
from cp_plugin.testing.launch import main_with_nproc

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "seq_length": 128,
}
"""A model that a CPU trains in seconds."""


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="upstream", help="as --cp-provider; default: unmodified Bridge")
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--grid", help="rows x columns of attention2d")
    parser.add_argument("--layout")
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--steps", type=int, help="default: the recipe's")
    parser.add_argument("--small", action="store_true", help="two narrow layers in float32, without checkpoints")
    return parser.parse_args(words)


def recipe(args: argparse.Namespace) -> Any:
    """Bridge's recipe with the options, and without dropout, which providers do not shard over ranks."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    config = vanilla_gpt_pretrain_config()
    config.model.attention_dropout = config.model.hidden_dropout = 0.0
    config.model.position_embedding_type = "rope"
    config.model.context_parallel_size = args.context_parallel_size
    if args.small:
        for name, value in SMALL.items():
            setattr(config.model, name, value)
        config.mixed_precision = None
        config.tokenizer.vocab_size = SMALL["vocab_size"] - 1  # the null tokenizer adds one
        config.train.global_batch_size, config.logger.log_interval = 4, 1
        config.checkpoint.save = config.logger.tensorboard_dir = None
        config.validation.eval_iters = config.dataset.num_workers = 0
        config.dataset.persistent_workers = False
        config.scheduler.lr_warmup_iters = 0
    if args.seq_length is not None:
        config.model.seq_length = args.seq_length
    config.dataset.seq_length = config.model.seq_length
    if args.steps is not None:
        config.train.train_iters = args.steps
    return config


def train(words: list[str]) -> None:
    """Train as one rank."""
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    args = options(words)
    config = recipe(args)
    nemo.apply(config, provider=args.provider, grid=args.grid, layout=args.layout)
    pretrain(config, forward_step)


if __name__ == "__main__":
    sys.exit(main_with_nproc(sys.argv[1:], train, preload=nemo.activate))
