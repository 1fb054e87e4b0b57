"""The adapter's state: all that changes in this process while it runs, in one object.

Megatron calls the plugin from many sides, so what it needs to know has to be somewhere: here, and nowhere else in the
package. ``runtime`` looks up what most of them ask for.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary

import torch

from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm import Watch
from cp_plugin.comm.alarm import Alarm
from cp_plugin.core.layout import Layout
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.methods.protocol import Kind
from cp_plugin.methods.registry import Resolved

Scope = Literal["run", "process"]
"""What a patch is in place for: a run, or CPU mode and a wheel, which stay when a run's patches are undone."""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere a replaced symbol was held: a module or a class, and the name there."""

    owner: Any
    name: str
    original: Any
    replacement: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The attention of the model that the flags describe."""

    problem: Problem
    """A softmax attention call, on one rank; with padding, of padded sequences."""
    resolved: Mapping[Kind, Resolved]
    """What the providers of the kinds of attention that the plugin computes chose for it, without knowing the hosts."""
    converted: bool = False
    """Whether Megatron's layout manager converts around attention, and tokens are contiguous elsewhere."""
    padding: int = 0
    """Tokens behind the end of each sequence, or of each pack of documents, that do not count."""
    parts: int = 1
    """Tensor-parallel ranks that share the tokens of a context-parallel rank, by sequence parallelism."""
    experts: bool = False
    """Whether routers balance tokens over experts."""
    left: int | None = None
    """How many tokens before itself a token sees in every layer; None: in some, all."""

    @property
    def tokens(self) -> int:
        """Of a sequence, or a pack, without its padding."""
        return self.problem.seq_length - self.padding


class Pack(NamedTuple):
    """The documents of a micro-batch."""

    layout: Layout
    """Of its tokens."""
    bounds: torch.Tensor
    """Where documents begin, and the end: int64, on the CPU."""


@dataclass(slots=True)
class State:
    """What this process knows at the moment."""

    settings: Settings = field(default_factory=Settings)
    """What the flags said."""
    model: Model | None = None
    """None where no flags described a model."""
    by_ranks: dict[tuple[int, ...], Mapping[Kind, ContextParallel]] = field(default_factory=dict)
    """Of the ranks of each context-parallel group."""
    alone: dict[Kind, ContextParallel] = field(default_factory=dict)
    """Of groups of one rank."""
    batch_sliced: bool = False
    """Whether a batch was sliced in the layout."""
    documents_expected: bool = False
    """Whether attention is called with packed documents only: in the training of a model whose flags ask for them."""
    loss_checked: bool = False
    """Whether what tokens weigh in the script's loss was compared over the ranks."""
    last_pack: Pack | None = None
    """That softmax attention was called with."""
    compared: argparse.Namespace | None = None
    """What the ranks compare in place of the arguments that Megatron has parsed."""
    replaced: dict[Scope, dict[str, list[Place]]] = field(default_factory=lambda: {"run": {}, "process": {}})
    """Target of a patch -> where it was replaced."""
    leave_cpu: contextlib.ExitStack | None = None
    """How to leave CPU mode, while it is on."""
    alarm: Alarm | None = None
    """By which this rank tells the others of its failure, and hears of theirs."""
    messages: Watch = field(default_factory=Watch)
    """The plugin's messages that this rank waits for."""
    quantized: WeakKeyDictionary[torch.nn.Module, ReferenceType[torch.nn.Module]] = field(
        default_factory=WeakKeyDictionary
    )
    """Attention that nvidia-modelopt has converted -> the model that it is in."""
    bridge_flags: dict[str, Any] | None = None
    """The plugin's flags, once a config of Bridge was prepared with a provider."""
    bridge_timeout_minutes: int = 10
    """Of Bridge's process groups."""


STATE = State()
