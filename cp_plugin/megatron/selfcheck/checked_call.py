"""The call of a layer that is checked in training: how it is drawn, and the error if it is wrong."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
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
class Place:
    """The checked call."""

    step: int
    _: KW_ONLY
    layer: int = 0  # 0: none, but the batch
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

    def name_ranks(self, texts: Sequence[str]) -> list[str]:
        """Return what is wrong on the ranks of the group, from a text of each, which may be empty."""
        return [f"rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True) if text]

    def stop_if_any(
        self, wrong: Sequence[str], where: str, claim: str, cause: str, error: type[RuntimeError] = AttentionError
    ) -> None:
        """Raise an error if something is wrong; in the start-up check, only note it.

        where, claim: make a sentence; cause: another one.
        """
        if not wrong:
            return
        layer = f"layer {self.layer}, " if self.layer else ""
        if self.problems is not None:
            self.problems.append(f"{layer}{where}: {'; '.join(wrong[:3])}")
            return
        flag = f"--cp-check-every {runtime.settings().check_every or ''}".rstrip()
        more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
        raise error(
            f"{flag}: in step {self.step}, {layer}on the {self.cp.layout.name} layout, {where} {claim}. "
            f"{'; '.join(wrong[:4])}{more}. {cause}. Resume from an earlier checkpoint; "
            "--cp-check-every 0 checks nothing"
        )


class Drawn:
    """A micro-batch of each checked step, and in it one of several layers, drawn alike by tensor-parallel ranks."""

    def __init__(self, due: Callable[[], int], salt: str = "") -> None:
        """due: returns the current step if it is checked, or 0."""
        self._due, self._salt = due, salt
        self.step = self._earlier = 0  # the current one; calls of the layer before the drawn one
        self._left = False  # whether the drawn call is still to come
        self._layer: Any = None
        self.draw = random.Random()
        self.problems: list[str] | None = None  # see ``Place``
        self._without_gradients = 0  # step in which a call without them was checked; the one with them is awaited

    @property
    def rows(self) -> bool:
        """True if rows are compared, beside the identities."""
        return runtime.settings().check_every > 0 or self.step == STATE.owed

    def take(self, training: bool, layer: Any = None, among: Iterable[Any] = (None,)) -> bool:
        """Count a call of a layer; return True if it is the drawn one of a checked step, or its recomputation.

        among: the layers of which one is drawn.
        """
        step = self._due() if training else 0
        if step and step != self.step:
            self.step = step
            self.draw = random.Random(f"{step} {parallel_state.get_data_parallel_rank()}{self._salt}")
            layers = list(among)
            self._left = bool(layers)
            self._layer = self.draw.choice(layers) if layers else None
            self._earlier = self.draw.randrange(get_num_microbatches())
        if not step or not self._left or layer is not self._layer:
            return False
        if self._earlier > 0:
            self._earlier -= 1
            return False
        if torch.is_grad_enabled():
            self._left = False
        elif self._without_gradients == step:
            return False
        self._without_gradients = step
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
        super().__init__(lambda: 0)
        self.draw, self.problems = random.Random("start-up"), list[str]()
        self.calls = 0
        self.readings = set[Any]()
        """How softmax layers read their configuration: one layer of each is compared with Megatron's own attention."""

    def take(self, training: bool, layer: Any = None, among: Iterable[Any] = (None,)) -> bool:
        taken = training and not modelopt.quantizes(layer)
        self.calls += taken
        return taken

    @property
    def summary(self) -> list[str]:
        """What is wrong on this rank, in short."""
        texts = self.problems or []
        return [*texts[:2], f"and {len(texts) - 2} more"] if len(texts) > 3 else texts
