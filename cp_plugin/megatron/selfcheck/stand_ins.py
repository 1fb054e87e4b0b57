"""A step by Megatron's ``train_step``, with stand-ins for the optimizer and the schedule of learning rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers
from megatron.training import global_vars
from torch import Tensor

from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.probing import accepted

_SAVED = ("params", "activations", "tokens_per_expert", "wgrads", "dgrads")
_OFF: dict[str, Any] = {f"save_{what}_interval": None for what in _SAVED} | {"empty_unused_memory_level": 0}
_OFF |= dict.fromkeys(("qk_clip", "log_max_attention_logit", "vision_pretraining", "modelopt_enabled"), False)
"""Arguments of what such a step does without."""


class _Instead:
    """In place of a part of the run, which is asked for everything else."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_other"], name)


class Optimizer(_Instead):
    """Takes the gradients, and changes no weights."""

    def __init__(self, other: Any, read: Callable[[], Tensor]) -> None:
        """read: the gradients of this rank's part."""
        super().__init__(other)
        self._read = read

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """The model's are zeroed apart."""

    def step(self) -> tuple[bool, float, int]:
        self.gradient = self._read().clone()
        return True, 0.0, 0


class Schedule(_Instead):
    """Takes the number of samples, and changes no learning rate."""

    samples: int | None = None

    def step(self, increment: int) -> None:
        self.samples = increment

    def problems(self) -> list[str]:
        want = None if self.samples is None else calculator.get_current_running_global_batch_size()
        if self.samples == want:
            return []
        return [f"learning rates advance by {self.samples} samples in a step of {want}"]


class _Once(_Instead):
    """In place of Megatron's repetitions of steps."""

    def __init__(self, other: Any) -> None:
        super().__init__(other)
        self._turns = iter((True, False))

    def should_run_forward_backward(self, _: Any) -> bool:
        """Once."""
        return next(self._turns)

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        return False, False, 0


def train_step(
    forward: Callable[..., Any],
    batches: Iterator[Any],
    model: Any,
    optimizer: Optimizer,
    schedule: Schedule,
    sizes: Mapping[str, int],
) -> dict[str, Tensor]:
    """The losses that are logged, of a step by Megatron's loop, without what is wrapped around it.

    Other loops are not called; nor is a ``train_step`` that cannot be run for such a model, which is said. Then the
    gradient is that of Megatron's schedule alone, and no losses are returned.

    Args:
        forward, batches: as Megatron's schedule takes them.
        sizes: ``num_microbatches``, ``seq_length`` and ``micro_batch_size`` of the step.
    """
    passes = schedules.forward_backward_no_pipelining
    began = ended = False

    def scheduled(**named: Any) -> Any:
        nonlocal began, ended
        began = True
        losses = passes(**accepted(passes, **named | sizes))
        ended = True
        return losses

    args = global_vars._GLOBAL_ARGS
    if args is not None:
        from megatron.training import training  # other loops do without it

        off = {name: value for name, value in _OFF.items() if hasattr(args, name)}
        once, timers = _Once(training.get_rerun_state_machine()), Timers(0, "max")
        lent = patching.lent(training, get_rerun_state_machine=lambda: once, get_timers=lambda: timers)
        step = inspect.unwrap(training.train_step)
        also = accepted(step, iteration=0)
        try:
            with patching.lent(args, **off), lent:
                return step(forward, batches, [model], optimizer, schedule, model.config, scheduled, **also)[0] or {}
        except Exception as error:
            if began and not ended:
                raise  # in the schedule, whose other ranks wait
            if dist.get_rank() == 0:
                print(
                    "cp_plugin: the self-check cannot run train_step of this Megatron for its model of one weight: "
                    f"{type(error).__name__}: {error}. What it does around its schedule is not checked",
                    flush=True,
                )
    if not ended:
        scheduled(forward_step_func=forward, data_iterator=batches, model=[model])
    optimizer.step()
    return {}
