"""The call of a layer's attention that is checked in training, and the error if it is wrong."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import WHOLE
from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers import modelopt
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.state import STATE

PHASE = "check"  # phase in the ledger
CALL = inspect.signature(AnyCoreAttention.forward)


class AttentionError(RuntimeError):
    """A step's attention is not that of its queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Which steps are checked."""

    every: int
    iterations: Callable[[], int]  # the number of finished ones

    def due(self) -> int:
        """The current step; 0 if it is not checked."""
        step = self.iterations() + 1
        if STATE.trial:
            return 0
        if STATE.owed < 0:
            STATE.owed = step
        return 0 if step % self.every and step != STATE.owed else step


@dataclass(frozen=True, slots=True)
class Place:
    """The checked call."""

    step: int
    _: KW_ONLY
    layer: int = 0
    cp: ContextParallel
    group: dist.ProcessGroup | None
    draw: random.Random  # in the same state on all ranks of the group
    tp_rank: int = 0
    problems: list[str] | None = None  # of this rank, in the start-up check; None: what is wrong is an error at once

    @property
    def ranks(self) -> list[int]:
        """The numbers of the group's ranks among all."""
        return [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def hops(self) -> int:
        """Roundings of a gradient that is summed between ranks."""
        return self.cp.size if self.cp.options.gradient_dtype == "model" else 0

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor; collective over the group."""
        if self.group is None or self.group.size() == 1:
            return [x]
        x = x.contiguous()
        everyone = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(everyone, x, group=self.group)
        self.cp.mesh.ledger.record("all_gather", WHOLE, (self.group.size() - 1) * x.nbytes)
        return everyone

    @contextmanager
    def booked(self) -> Iterator[None]:
        """Record bytes under the phase of the check."""
        with self.cp.mesh.ledger.phase(PHASE), torch.no_grad():
            yield


class Drawn:
    """A micro-batch of each checked step, and in it one of several layers, drawn alike by tensor-parallel ranks."""

    def __init__(self, steps: Steps, salt: str = "") -> None:
        self.steps, self._salt = steps, salt
        self.step = self.earlier = 0  # the current one; calls of the layer before the drawn one
        self.layer: Any = None  # until it is checked
        self.draw = random.Random()
        self.problems: list[str] | None = None  # see ``Place``
        self._without_gradients = 0  # step in which a call without them was checked; the one with them is awaited

    @property
    def rows(self) -> bool:
        """Whether rows are compared, beside the identities."""
        return runtime.settings().check_every > 0 or self.step == STATE.owed

    def begin(self, training: bool, layers: Iterable[Any] = (None,)) -> bool:
        """Draw in a checked step that is new; return True if this step is checked."""
        step = self.steps.due() if training else 0
        if step and step != self.step:
            self.step = step
            self.draw = random.Random(f"{step} {parallel_state.get_data_parallel_rank()}{self._salt}")
            among = list(layers)
            self.layer = self.draw.choice(among) if among else None
            self.earlier = self.draw.randrange(get_num_microbatches())
        return step > 0

    def is_due(self) -> bool:
        """Count a call of the layer; return True if it is the drawn one, once."""
        self.earlier -= 1
        return self.earlier == -1

    def is_next(self, layer: Any) -> bool:
        """Return True if this layer's next call is the drawn one."""
        return layer is self.layer and self.earlier == 0

    def take(self, layer: Any) -> bool:
        """Count a call of a layer; return True if it is the drawn one, or its recomputation."""
        if layer is not self.layer or not layer.training:
            return False
        if self.earlier > 0:
            self.earlier -= 1
            return False
        if torch.is_grad_enabled():
            self.layer = None
        elif self._without_gradients == self.step:
            return False
        self._without_gradients = self.step
        return True

    def place(self, cp: ContextParallel, group: dist.ProcessGroup | None, layer: Any = None) -> Place:
        """Return the checked call: of this layer, or of none."""
        tensor, number = getattr(layer, "tp_group", None), getattr(layer, "layer_number", 0)
        rank = 0 if tensor is None else tensor.rank()
        return Place(self.step, layer=number, cp=cp, group=group, draw=self.draw, tp_rank=rank, problems=self.problems)


class Every(Drawn):
    """Every call of the start-up check's step that nvidia-modelopt does not quantise."""

    rows = True

    def __init__(self) -> None:
        super().__init__(Steps(1, lambda: 0))
        self.draw, self.problems = random.Random("start-up"), list[str]()
        self.calls, self._readings = 0, set[Any]()

    def begin(self, training: bool, layers: Iterable[Any] = (None,)) -> bool:
        return training

    def is_next(self, layer: Any) -> bool:
        return not modelopt.quantizes(layer)

    def take(self, layer: Any) -> bool:
        taken = layer.training and self.is_next(layer)
        self.calls += taken
        return taken

    @property
    def found(self) -> list[str]:
        """What is wrong on this rank, in short."""
        texts = self.problems or []
        return [*texts[:2], f"and {len(texts) - 2} more"] if len(texts) > 3 else texts

    def reads(self, layer: Any) -> bool:
        """Return True for the first of the softmax layers whose configuration is read alike."""
        before, reading = len(self._readings), (layer.window, layer.attn_mask_type, layer.softmax_scale)
        self._readings.add(reading)
        return len(self._readings) > before
