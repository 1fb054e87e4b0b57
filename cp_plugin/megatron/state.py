"""The adapter's mutable state, in one object; ``runtime`` has the common lookups."""

from __future__ import annotations

import argparse
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm.alarm import Alarm
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.engine.methods.registry import Resolved
from cp_plugin.megatron.flags.args import Settings

Scope = Literal["run", "process"]
"""Lifetime of a patch: a run, or the process (CPU mode, wheel), which outlives a run's patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The attention of the model that the flags describe."""

    problem: Problem  # a softmax attention call on one rank, including padding
    resolved: Mapping[Kind, Resolved]  # the providers' choices, before the hosts are known
    converted: bool = False
    """Whether Megatron's layout manager converts around attention, and tokens are contiguous elsewhere."""
    padding: int = 0  # padding tokens at the end of each sequence or pack
    parts: int = 1
    """Tensor-parallel ranks that share a context-parallel rank's tokens under sequence parallelism."""
    experts: bool = False
    left: int | None = None  # window of past tokens in every layer; None: some layer sees all

    @property
    def tokens(self) -> int:
        """Length of a sequence or pack without padding."""
        return self.problem.seq_length - self.padding


@dataclass
class Cut:
    """What was seen of batches where they are sliced."""

    any: bool = False  # whether one was sliced in the layout
    packed: bool = False  # whether every attention call must have packed documents
    lengths: deque[int] = field(default_factory=partial(deque, maxlen=4096))
    """Hashes of the lengths of documents by which batches were sliced in training (``--cp-layout documents``)."""


@dataclass
class State:
    """The state of this process."""

    settings: Settings = field(default_factory=Settings)
    model: Model | None = None  # None if no flags described a model
    by_ranks: dict[tuple[int, ...], Mapping[Kind, ContextParallel]] = field(default_factory=dict)
    """By the ranks of a context-parallel group."""
    alone: dict[Kind, ContextParallel] = field(default_factory=dict)  # for groups of one rank
    cut: Cut = field(default_factory=Cut)
    first_batch: Callable[[Mapping[str, Any], dist.ProcessGroup | None], None] | None = None
    """Compares the first batch between the ranks."""
    unchecked: tuple[Any, Any] | None = None
    """Optimizer and schedule of learning rates of a training run whose first step is still to be checked."""
    owed: int = 0
    """Step in which attention is checked since the start-up check could not be run; -1: the next one."""
    loaded: Mapping[str, str] = field(default_factory=dict)  # settings of the last checkpoint that was read
    losses: dict[str, tuple[float, float]] | None = None  # of the first step, to be compared with those logged
    trial: bool = False  # while the start-up check runs a step
    slices: Any = None  # ``selfcheck.slices.Slices``, told each micro-batch and its loss in checked steps
    complete: Callable[[Sequence[torch.nn.Module]], None] = lambda _: None
    """Installs the patches that these models need though no flag says so."""
    compared: argparse.Namespace | None = None  # arguments that the ranks compare instead of Megatron's
    replaced: dict[Scope, dict[str, Any]] = field(default_factory=lambda: {"run": {}, "process": {}})
    """Target of a patch -> its ``patching.Finding``."""
    leave_cpu: contextlib.ExitStack | None = None  # undoes CPU mode while it is on
    alarm: Alarm | None = None  # exchanges failure reports with the other ranks
    quantized: WeakKeyDictionary[torch.nn.Module, ReferenceType[torch.nn.Module]] = field(
        default_factory=WeakKeyDictionary
    )
    """Attention converted by nvidia-modelopt -> its model."""
    bridge_flags: dict[str, Any] | None = None
    """The plugin's flags, once a Bridge config was prepared with a provider."""
    bridge_timeout_minutes: int = 10  # timeout of Bridge's process groups


STATE = State()
