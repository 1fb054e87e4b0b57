"""The flags that commands of ``cp-plugin`` share, and how their errors are shown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import torch
import typer

from cp_plugin.core.problem import Options
from cp_plugin.core.versions import NO_MEGATRON
from cp_plugin.testing.launch import RankError


class Dtype(StrEnum):
    """Element types of q, k and v."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    """Where to run; ``auto`` is the CPU only where there is no CUDA device."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Decays(StrEnum):
    """What the decay of linear attention belongs to."""

    none = "none"
    head = "head"
    token = "token"
    key = "key"


class Travels(StrEnum):
    """What travels around a ring in the backward."""

    auto = "auto"
    kv = "kv"
    q = "q"


class Fp8(StrEnum):
    """What is in FP8."""

    off = "off"
    comm = "comm"
    compute = "compute"


class GradientDtype(StrEnum):
    """In what sums of gradients travel."""

    float32 = "float32"
    model = "model"


Providers = Annotated[
    list[str] | None, typer.Option("--provider", help="context-parallel method; repeat for several; default: all")
]
Layout = Annotated[str | None, typer.Option(help="contiguous, zigzag or striped; default: the provider's")]
Grid = Annotated[str | None, typer.Option(metavar="RxC", help="rows x columns of a 2D method's grid of ranks")]
HeadParallel = Annotated[int | None, typer.Option(help="ranks that share the heads of the same tokens")]
IntraSize = Annotated[int | None, typer.Option(help="ranks of the inner one of two nested rings")]
Backward = Annotated[Travels | None, typer.Option(help="what travels around a ring in the backward")]
HeadGroups = Annotated[int | None, typer.Option(help="groups of heads between which communication overlaps")]
InFp8 = Annotated[Fp8, typer.Option(help="comm: payloads travel in FP8; compute: and kernels compute in it")]
SumsIn = Annotated[
    GradientDtype, typer.Option(help="in what sums of gradients travel: float32, or the model's dtype (half of it)")
]
ValueDim = Annotated[int, typer.Option(help="size of a value head; 0: as --head-dim")]
Recompute = Annotated[str | None, typer.Option(help="none, selective, full; default: as little as fits the memory")]
PerNode = Annotated[int | None, typer.Option(help="devices of a node; default: the cluster's")]
Nics = Annotated[int | None, typer.Option(help="network cards of a node; default: the cluster's")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


def in_our_flags(text: str) -> str:
    """A message of the core, which names the flags of a training, with those of this command."""
    return text.replace("--context-parallel-size", "--size").replace("--cp-", "--")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What a user can put right: one line on stderr and exit status 2. A rank that failed: its report, and 1."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {in_our_flags(str(error))}", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "megatron":
            raise
        typer.echo(f"error: {NO_MEGATRON}", err=True)
        raise typer.Exit(2) from None
    except RankError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def options(
    grid: str | None,
    head_parallel: int | None,
    intra_size: int | None,
    backward: Travels | None,
    head_groups: int | None,
    layout: str | None = None,
    backend: str = "auto",
    fp8: Fp8 = Fp8.off,
    gradient_dtype: GradientDtype = GradientDtype.float32,
) -> Options:
    """What the flags ask for; ValueError for a grid that cannot be read."""
    return Options(
        layout=layout,
        backend=backend,
        grid=_grid(grid),
        head_parallel=head_parallel,
        intra_size=intra_size,
        backward=backward.value if backward is not None else None,
        head_groups=head_groups,
        fp8=None if fp8 == Fp8.off else fp8.value,
        gradient_dtype=None if gradient_dtype == GradientDtype.float32 else gradient_dtype.value,
    )


def _grid(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", text, re.ASCII)
    if found is None:
        raise ValueError(f"--grid {text}: write rows x columns, such as 8x8")
    return int(found[1]), int(found[2])


def check_sizes(given: Mapping[str, int | None]) -> None:
    """ValueError for a flag whose number is below 1; None is a flag that was not given."""
    for flag, number in given.items():
        if number is not None and number < 1:
            raise ValueError(f"{flag} {number}: write a whole number, 1 or more")


def check_timeout(seconds: float) -> None:
    """ValueError for one that never ends, or is no number."""
    if not math.isfinite(seconds):
        raise ValueError(f"--timeout {seconds}: write seconds, such as 3600")


def changes(per_node: int | None, nics: int | None) -> dict[str, int]:
    """What is given of the sizes of a cluster's nodes, by their names there."""
    return {name: n for name, n in (("per_node", per_node), ("nics", nics)) if n is not None}


def torch_dtype(name: Dtype) -> torch.dtype:
    """The element type of that name."""
    return getattr(torch, name.value)


def device_name(asked: Device) -> str:
    """``cpu`` or ``cuda``, without touching CUDA, which may only be done after ranks are forked."""
    devices = torch.cuda.device_count()
    if asked == Device.cuda and devices == 0:
        raise ValueError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cpu" if asked == Device.cpu or devices == 0 else "cuda"
