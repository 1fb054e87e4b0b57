"""Who takes part: any provider with any options, and PyTorch's own ring, behind one interface.

ring                                  a provider with all choices left to it
attention2d:grid=8x8,head_parallel=4  with options
torch-ring:rotate=alltoall,hops=p2p   PyTorch's experimental context parallelism, see ``peer``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, Self

import torch.distributed as dist
from peer import TorchRing
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, providers
from cp_plugin.calls import Inputs, through_autograd
from cp_plugin.mesh import TraceMesh
from cp_plugin.protocol import Kind
from cp_plugin.text import in_words

PEER = "torch-ring"
_NUMBERS = ("head_parallel", "intra_size", "head_groups")


class Contestant(Protocol):
    """One way to compute attention over all ranks. Tensors outside are ``[s, b, heads, d]``."""

    @property
    def settings(self) -> str:
        """What was chosen, in a few words."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Why it was chosen; a sentence each."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the contestant's own order of dimensions."""
        ...

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, between: Callable[[], object]) -> tuple[Tensor, ...]:
        """Forward, ``between``, and backward on this rank's parts: out, dq, dk, dv."""
        ...

    def booked(self) -> int | None:
        """Bytes this rank has sent since the last call, by the ledger; None without one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a user asked for with ``--run``: a provider's name, or the peer's, and options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def provided(self) -> bool:
        """Whether it is a provider of this project."""
        return self.name != PEER

    @property
    def kind(self) -> Kind:
        """What it computes."""
        return providers.get(self.name).kind if self.provided else "softmax"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``name[:option=value[,option=value]]``; ValueError that names the part which is wrong."""
        name, _, rest = text.partition(":")
        known = [*providers.names(), *providers.names("linear"), PEER]
        if name not in known:
            raise ValueError(f"--run {text}: {name!r} is none of {', '.join(known)}")
        options = dict(_option(text, name, part) for part in rest.split(",")) if rest else {}
        return cls(name=name, options=tuple(options.items()))

    def __str__(self) -> str:
        chosen = ",".join(f"{key}={_shown(value)}" for key, value in self.options)
        return f"{self.name}:{chosen}" if chosen else self.name

    def start(self, problem: Problem) -> Contestant:
        """Get ready on this rank; collective over all ranks."""
        if self.name == PEER:
            return TorchRing(dist.group.WORLD, causal=problem.causal, **dict(self.options))
        cp = ContextParallel(self.name, group=dist.group.WORLD, problem=problem, **dict(self.options))
        return _Provided(cp, problem)

    def start_alone(self, problem: Problem, rank: int) -> Contestant:
        """The computation and the ledger of one rank of a provider, without its peers."""
        found = providers.settle(self.name, problem, Options(**dict(self.options)))
        mesh = TraceMesh(found.provider.axes(problem.size, found.options), rank)
        return _Provided(ContextParallel(self.name, mesh=mesh, problem=problem, **dict(self.options)), problem)


class _Provided:
    """A provider of this project."""

    def __init__(self, cp: ContextParallel, problem: Problem) -> None:
        self._cp, self._problem = cp, problem
        self.notes = tuple(cp.why)

    @property
    def settings(self) -> str:
        chosen = {k: v for k, v in asdict(self._cp.options).items() if v is not None and k not in ("backend", "layout")}
        return ", ".join([self._cp.layout.name, *(f"{k} {_shown(v)}" for k, v in chosen.items())])

    def shard(self, x: Tensor) -> Tensor:
        return self._cp.shard(x).contiguous()

    def step(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, between: Callable[[], object]) -> tuple[Tensor, ...]:
        inputs = Inputs(*(x.detach().requires_grad_() for x in (q, k, v, dout)))
        return through_autograd(self._cp, inputs, self._problem, between)

    def booked(self) -> int:
        sent = self._cp.mesh.ledger.bytes()
        self._cp.mesh.ledger.reset()
        return sent


def _option(text: str, name: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    choices = {"rotate": TorchRing.ROTATIONS, "hops": TorchRing.HOPS}
    known = list(choices) if name == PEER else [field.name for field in fields(Options)]
    if key not in known or not equals or not value:
        raise ValueError(f"--run {text}: {part!r} is no option=value; options of {name} are {', '.join(known)}")
    if name == PEER and value not in choices[key]:
        raise ValueError(f"--run {text}: {key} must be one of {', '.join(choices[key])}")
    if key in (*_NUMBERS, "grid") and value == "auto":
        return key, None
    try:
        return key, _value(key, value)
    except ValueError:
        wanted = "rows x columns, such as 8x4" if key == "grid" else "a whole number, or auto"
        raise ValueError(f"--run {text}: {key} must be {wanted}, not {value!r}") from None


def _value(key: str, value: str) -> Any:
    if key in _NUMBERS:
        return int(value)
    if key == "grid":
        rows, columns = map(int, value.split("x"))
        return rows, columns
    return value


def _shown(value: Any) -> str:
    return "auto" if value is None else in_words(value)
