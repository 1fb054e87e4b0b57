"""Contestants by name: any provider with options, and upstream peers; and the ideal that they are compared with.

ring                                  a provider with default options
attention2d:grid=8x8,head_parallel=4  with options
torch-ring:rotate=alltoall,hops=p2p   PyTorch's experimental context parallelism, see ``torch_ring``
te-a2a+p2p                            Transformer Engine's, see ``te_peer``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Inputs, Setup, call_kernel, call_through_autograd, settled, shapes
from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.linear.kernels import KERNELS
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.tools.bench import te_peer
from cp_plugin.tools.tables import settings

TORCH = "torch-ring"
_TE = "te-"
PEERS = (TORCH, *(f"{_TE}{comm_type}" for comm_type in te_peer.COMM_TYPES))
_TORCH_CHOICES = {"rotate": ("alltoall", "allgather"), "hops": ("alltoall", "p2p")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The name of a provider or a peer, with options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    text: str = field(default="", compare=False)
    """As written; empty: the name alone."""

    @property
    def provided(self) -> bool:
        """Return True for one of this project's providers."""
        return self.name not in PEERS

    @property
    def kind(self) -> Kind:
        return providers.get(self.name).kind if self.provided else "softmax"

    @classmethod
    def parse(cls, text: str, flag: str = "--provider") -> Self:
        """Parse ``name[:option=value[,option=value]]``; ValueError names the invalid part."""
        name, _, rest = text.partition(":")
        try:
            one_of(flag, name, [*providers.names(), *providers.names("linear"), *PEERS])
            options = dict(_option(name, part) for part in rest.split(",")) if rest else {}
        except ValueError as error:
            raise ValueError(f"{flag} {text}: {str(error).removeprefix(f'{flag} {name}: ')}") from None
        return cls(name=name, options=tuple(options.items()), text=text)

    def __str__(self) -> str:
        return self.text or self.name

    def missing(self, device: str) -> str | None:
        """Return why a peer is not available here, or None; providers always are."""
        if self.provided:
            return None
        if self.name != TORCH:
            return te_peer.missing(device)
        try:
            from cp_plugin.tools.bench import torch_ring  # noqa: F401
        except ImportError as error:
            return f"PyTorch {torch.__version__} has it elsewhere, or not at all: {error}"
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Return why a peer cannot do this problem, or None."""
        if self.name != TORCH:
            return te_peer.unsupported(self.name.removeprefix(_TE), problem)
        if problem.window is not None or problem.documents:
            return f"PyTorch's ring has no {'documents' if problem.documents else 'sliding window'}"
        if problem.dtype == torch.float64:
            return "PyTorch's ring merges in float32"
        if problem.v_head_dim != problem.head_dim:
            return "PyTorch's ring takes keys and values of one size"
        return None

    def setup(self, problem: Problem) -> Setup:
        """A provider with all options settled; ValueError for options that do not fit. Tokens are not placed for the
        documents, since one ``ContextParallel`` serves several packs."""
        return settled(providers.get(self.name), replace(problem, bounds=()), Options(**dict(self.options)))

    def peer(self, problem: Problem) -> Contestant:
        """Set a peer up on this rank; collective over all ranks."""
        if self.name != TORCH:
            return te_peer.TransformerEngine(self.name.removeprefix(_TE), problem)
        from cp_plugin.tools.bench.torch_ring import TorchRing

        return TorchRing(dist.group.WORLD, causal=problem.causal, **dict(self.options))


def _option(name: str, part: str) -> tuple[str, Any]:
    key, _, value = part.partition("=")
    declared = {} if name in PEERS else providers.registry().options
    known = _TORCH_CHOICES if name == TORCH else declared
    if key not in known or not value:
        raise ValueError(f"{part!r} is not option=value; options of {name} are {', '.join(known) or 'none'}")
    if name == TORCH or key == "backend":
        one_of(key, value, _TORCH_CHOICES[key] if name == TORCH else (*backends.names(), *KERNELS))
        return key, value
    return key, declared[key].parse(value)


class Contestant(Protocol):
    """One way to compute attention over all ranks. Whole tensors are ``[s, b, heads, d]``."""

    @property
    def settings(self) -> str:
        """The chosen options, in a few words."""

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the contestant's own order of dimensions."""

    def arranged(self, x: Tensor) -> Tensor:
        """A part ``[s / size, b, heads, d]`` in that order."""

    def step(self, x: Inputs, between: Callable[[], object] = lambda: None) -> tuple[Tensor, ...]:
        """Forward, ``between``, and backward on this rank's parts: ``testing.oracle.tensors``."""

    def booked(self) -> int | None:
        """Bytes this rank has sent since the last call, by its ledger; None without one."""


class Provided:
    """A provider of this project, as a ``Contestant``."""

    def __init__(self, cp: ContextParallel, setup: Setup, problem: Problem) -> None:
        self._cp, self._problem = cp, problem
        self.settings = settings(setup)

    def shard(self, x: Tensor) -> Tensor:
        return x if x.dim() == 1 else self._cp.shard(x).contiguous()  # a decay per head has no token dimension

    def arranged(self, x: Tensor) -> Tensor:
        return x

    def step(self, x: Inputs, between: Callable[[], object] = lambda: None) -> tuple[Tensor, ...]:
        leaves = Inputs(*(None if y is None else y.detach().requires_grad_() for y in x))
        return call_through_autograd(self._cp, leaves, self._problem, between)

    def booked(self) -> int:
        sent = self._cp.mesh.ledger.bytes()
        self._cp.mesh.ledger.reset()
        return sent


class Share(NamedTuple):
    """A rank's share of the work."""

    factor: float
    """1 / size of all the work, over the work of one step."""
    step: Callable[..., tuple[Tensor, ...]]
    """Forward, the callback that it is given, backward."""


def share(problem: Problem, setup: Setup | None, device: torch.device) -> Share:
    """The ideal: a rank's share of the work in one call of the same kernel, without communication.

        softmax   1 / size of the heads, one at least, on the whole sequence
        linear    as many tokens as a rank has

    For a provider's kernel, or, without a setup, for a peer's: the one of ``--cp-backend auto``. All ranks compute at
    the same time, so ranks that share a processor share it in the ideal, too.
    """
    size = problem.size
    if setup is not None and setup.provider.kind == "linear":
        tokens = problem.seq_length // size
        ends = (*(b for b in problem.bounds if b < tokens), tokens) if problem.bounds else ()
        cp = ContextParallel(setup.provider, group=None, backend=setup.options.backend)
        alone = replace(problem, size=1, seq_length=tokens, bounds=ends)
        return Share(1.0, partial(Provided(cp, setup, alone).step, random_parts(problem, tokens, device)))
    kv_heads = max(1, problem.kv_heads // size)
    heads = min(kv_heads * problem.heads // problem.kv_heads, max(1, problem.heads // size))
    part = replace(problem, heads=heads, kv_heads=kv_heads)
    kernel = blocks.choose(Options() if setup is None else setup.options, part, device).kernel
    inputs, mask = random_parts(part, problem.seq_length, device)[:4], problem.mask()

    def step(between: Callable[[], object] = lambda: None) -> tuple[Tensor, ...]:
        return call_kernel(kernel, inputs, mask, between=between)

    return Share(problem.heads / (size * heads), step)


def random_parts(problem: Problem, tokens: int, device: torch.device) -> Inputs:
    """Draw random inputs of this many tokens."""
    like = shapes(problem, tokens)
    q, k, v, dout = (torch.randn_like(x, device=device) for x in like[:4])
    decay = None if like.log_decay is None else -torch.rand_like(like.log_decay, device=device, dtype=torch.float32)
    return Inputs(q, k, v, dout, decay)
