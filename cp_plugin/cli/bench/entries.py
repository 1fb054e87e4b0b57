"""Who takes part: any provider with any options, and upstream peers, by the names that users give.

ring                                  a provider with all choices left to it
attention2d:grid=8x8,head_parallel=4  with options
torch-ring:rotate=alltoall,hops=p2p   PyTorch's experimental context parallelism, see ``torch_ring``
te-a2a+p2p                            Transformer Engine's, see ``te_peer``
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli.bench import names, te_peer
from cp_plugin.cli.bench.contestant import Contestant, Provided
from cp_plugin.core.problem import Backward, Fp8, GradientDtype, Options, Problem
from cp_plugin.core.text import in_words
from cp_plugin.kernels import backends
from cp_plugin.linear.kernels import KERNELS
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind

TORCH = "torch-ring"
_TE = "te-"
PEERS = (TORCH, *(f"{_TE}{comm_type}" for comm_type in te_peer.COMM_TYPES))
_NUMBERS = ("head_parallel", "intra_size", "head_groups")
_TORCH_CHOICES = {"rotate": ("alltoall", "allgather"), "hops": ("alltoall", "p2p")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A provider's name, or a peer's, and options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def provided(self) -> bool:
        """Whether it is a provider of this project."""
        return self.name not in PEERS

    @property
    def kind(self) -> Kind:
        """What it computes."""
        return providers.get(self.name).kind if self.provided else "softmax"

    @classmethod
    def parse(cls, text: str, flag: str = "--provider") -> Self:
        """Read ``name[:option=value[,option=value]]``; ValueError that names the part which is wrong."""
        name, _, rest = text.partition(":")
        try:
            names.check(flag, name, [*providers.names(), *providers.names("linear"), *PEERS])
            options = dict(_option(name, part) for part in rest.split(",")) if rest else {}
        except ValueError as error:
            raise ValueError(f"{flag} {text}: {str(error).removeprefix(f'{flag} {name}: ')}") from None
        return cls(name=name, options=tuple(options.items()))

    def __str__(self) -> str:
        shown = (f"{key}={'auto' if value is None else in_words(value)}" for key, value in self.options)
        chosen = ",".join(shown)
        return f"{self.name}:{chosen}" if chosen else self.name

    def missing(self, device: str) -> str | None:
        """Why a peer is not here, or None; providers are."""
        if self.provided:
            return None
        if self.name != TORCH:
            return te_peer.missing(device)
        try:
            from cp_plugin.cli.bench import torch_ring  # noqa: F401
        except ImportError as error:
            return f"PyTorch {torch.__version__} has it elsewhere, or not at all: {error}"
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Why a peer cannot do this problem, or None."""
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
        """A provider with all its choices made; ValueError for options that do not fit."""
        return settled(providers.get(self.name), problem, Options(**dict(self.options)))

    def start(
        self, problem: Problem, cp: ContextParallel | None = None, cu_seqlens: Tensor | None = None
    ) -> Contestant:
        """Get ready on this rank; collective over all ranks.

        Args:
            cp: of a provider, where it is there already.
            cu_seqlens: where the documents begin, and the length of the sequence.
        """
        if self.provided:
            made = cp or ContextParallel(self.name, group=dist.group.WORLD, problem=problem, **dict(self.options))
            return Provided(made, problem, cu_seqlens)
        if self.name != TORCH:
            return te_peer.TransformerEngine(self.name.removeprefix(_TE), problem)
        from cp_plugin.cli.bench.torch_ring import TorchRing

        return TorchRing(dist.group.WORLD, causal=problem.causal, **dict(self.options))


def _option(name: str, part: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    known = {TORCH: list(_TORCH_CHOICES)}.get(name, [] if name in PEERS else [field.name for field in fields(Options)])
    if key not in known or not equals or not value:
        raise ValueError(f"{part!r} is no option=value; options of {name} are {', '.join(known) or 'none'}")
    if name == TORCH and value not in _TORCH_CHOICES[key]:
        raise ValueError(f"{key} must be one of {', '.join(_TORCH_CHOICES[key])}")
    words = {
        "backend": (*backends.names(), *KERNELS),
        "backward": get_args(Backward),
        "fp8": get_args(Fp8),
        "gradient_dtype": get_args(GradientDtype),
    }
    if key in words:
        names.check(key, value, words[key])
    if key in (*_NUMBERS, "grid") and value == "auto":
        return key, None
    try:
        return key, _value(key, value)
    except ValueError:
        wanted = "rows x columns, such as 8x4" if key == "grid" else "a whole number, or auto"
        raise ValueError(f"{key} must be {wanted}, not {value!r}") from None


def _value(key: str, value: str) -> Any:
    if key in _NUMBERS:
        return int(value)
    if key == "grid":
        rows, columns = map(int, value.split("x"))
        return rows, columns
    return value
