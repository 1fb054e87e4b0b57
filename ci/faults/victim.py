"""The training that a fault is planted in: the plugin's own pretraining, with losses printed in full and a timeout in
seconds. Called on forked ranks by ``trial``, or under torchrun as a program:

    FAULT='{"timeout": 20, "mark": "/tmp/mark", "plants": [{"rank": 1, "do": "kill"}]}' torchrun ... victim.py FLAGS
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from planted import Plant, plant


def train(words: list[str], *, timeout: float, plants: Sequence[Plant], mark: Path) -> None:
    """Pretrain on this rank as the flags say."""
    _set_timeout(timeout)
    _print_losses()
    for planted in plants:
        plant(planted, mark)
    from cp_plugin.pretrain_gpt import _train

    _train(words)


def _set_timeout(seconds: float) -> None:
    """Megatron's flag has whole minutes; what it sets has not."""
    from cp_plugin.megatron.patches import hooks

    original: Callable[..., contextlib.AbstractContextManager[None]] = hooks.validation

    @contextlib.contextmanager
    def validation(parsed):
        with original(parsed):
            yield
        parsed.distributed_timeout_minutes = seconds / 60

    hooks.validation = validation


def _print_losses() -> None:
    """The loss of every step with all its bits, from each rank that knows it."""
    from megatron.training import training

    step = training.train_step

    @functools.wraps(step)
    def train_step(*args, **named):
        result = step(*args, **named)
        if "lm loss" in result[0]:
            iteration = training.get_args().curr_iteration + 1
            os.write(2, f"\nLOSS {iteration} {float(result[0]['lm loss']).hex()}\n".encode())
        return result

    training.train_step = train_step


if __name__ == "__main__":
    asked = json.loads(os.environ["FAULT"])
    from cp_plugin.pretrain_gpt import _preload

    _preload()
    train(
        sys.argv[1:],
        timeout=asked["timeout"],
        plants=[Plant(**one) for one in asked["plants"]],
        mark=Path(asked["mark"]),
    )
