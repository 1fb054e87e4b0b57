"""Load a checkpoint's model for inference: no optimizer, no gradients, no data."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from megatron.training import arguments, checkpointing, get_args, initialize, training

from cp_plugin.megatron import runtime
from cp_plugin.megatron.cpu.mode import use_compiled_helper
from cp_plugin.megatron.inference import saved_model
from cp_plugin.megatron.models import gpt
from cp_plugin.megatron.selfcheck import audit

NOT_OF_A_MODEL = (
    "--micro-batch-size 1 --train-iters 1 --lr 1 --optimizer sgd --mock-data "
    "--num-workers 0 --attention-dropout 0 --hidden-dropout 0 --no-load-optim --no-load-rng "
    "--exit-on-missing-checkpoint --no-masked-softmax-fusion --no-one-logger"
)
"""Training flags that Megatron's parser requires."""
DEFAULT_PROVIDER = "striped"


def flags(saved: tuple[Path, int | None] | None, rest: list[str]) -> list[str]:
    """Flags of the checkpoint's model, of no training, of the ranks, and last the user's, which win.

    Args:
        saved: folder and iteration of a checkpoint; None: the user gives all flags.
        rest: the user's flags.

    Raises:
        ValueError: as ``saved_model.flags`` does.
    """
    model: list[str] = []
    if saved is not None:
        empty = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        model = saved_model.flags(*saved, empty)
    given = {word.partition("=")[0] for word in rest}
    ranks: list[str] = []
    if saved is not None and "--context-parallel-size" not in given:
        tensor = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        tensor.add_argument("--tensor-model-parallel-size", type=int, default=1)
        size = int(os.environ["WORLD_SIZE"]) // max(1, tensor.parse_known_args(rest)[0].tensor_model_parallel_size)
        ranks = ["--context-parallel-size", str(size)]
        if size > 1 and "--cp-provider" not in given and "--cp-linear-attention" not in model:
            ranks += ["--cp-provider", DEFAULT_PROVIDER]
    return [*model, *NOT_OF_A_MODEL.split(), *ranks, *rest]


def load() -> torch.nn.Module:
    """The model that `sys.argv` describes, with the weights of ``--load``.

    Raises:
        ValueError: for flags that ``gpt`` refuses, and for several model chunks on a rank.
    """
    gpt.refuse(arguments.parse_args())
    use_compiled_helper()
    try:
        arguments.parse_and_validate_args()
        initialize.initialize_megatron()
    except AssertionError as error:
        raise ValueError(f"Megatron refuses the flags: {error}") from error
    chunks = training.get_model(gpt.build_model, wrap_with_ddp=False)
    if len(chunks) != 1:
        raise ValueError("generation does not support virtual pipeline stages: leave their flags out")
    if get_args().load is not None:
        checkpointing.load_checkpoint(chunks, None, None)
    if runtime.settings().active:
        audit.run(chunks)
    return chunks[0].eval()
