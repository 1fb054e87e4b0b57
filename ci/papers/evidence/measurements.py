"""Kinds of raw measurements with their predictions: collectives, attention kernels, trainings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cp_plugin.attention.setups import settled
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers
from cp_plugin.planner.machine import collectives, kernel_time
from cp_plugin.planner.machine.collectives import Group
from cp_plugin.planner.machine.events import Attention, Direction, Post, Shape
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.packs import in_each
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import Parallel, problem
from evidence import calls
from evidence.stacks import Machine

SHORT_MESSAGE, SHORT_SEQUENCE = 2**20, 4096
"""Bytes and tokens up to which fixed costs dominate."""
FASTEST = {"bytes": 2e12, "FLOPs": 5e15}
"""Per second; faster measurements must be in another unit."""
Size = Annotated[int, Field(gt=0)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]
Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Times = Annotated[tuple[Time, ...], Field(min_length=1)]
Verb = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send_receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement with its prediction."""

    source: str
    panel: str
    """Rows drawn together."""
    series: str
    axis: str
    """X axis of a series; empty: categorical."""
    size: float
    """X value."""
    what: str
    """Label: the size, and whatever distinguishes rows of a series."""
    unit: str
    published: float
    predicted: float
    short: bool
    """Whether fixed cost rather than rate dominates."""
    part: str
    """Part of the planner that predicts it."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


class Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Messages(Data):
    """A collective within a node; sizes as in nccl-tests."""

    verb: Verb
    ranks: Annotated[int, Field(gt=1)]
    kib: Sizes
    """Total of an all-gather or reduce-scatter, else a rank's buffer."""
    microseconds: Times

    @model_validator(mode="after")
    def _checked(self) -> Messages:
        _in_step(self.verb, self.kib, self.microseconds)
        for kib, us in zip(self.kib, self.microseconds, strict=True):
            _slow_enough(f"{self.verb} of {kib} KiB", kib * 1024 / 2 / (us * 1e-6), "bytes")
        return self

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        """Predicted by the collectives of layers, and by attention's links (which never all-reduce)."""
        for kib, us in zip(self.kib, self.microseconds, strict=True):
            nbytes = kib * 1024
            for part, seconds in _posted(self.verb, self.ranks, nbytes, cluster).items():
                yield Row(
                    source=source, panel=f"{in_words(self.verb)}, by {part}", series=f"{self.ranks} GPUs",
                    axis="bytes", size=nbytes, what=in_kib(kib), unit="us", published=us, predicted=1e6 * seconds,
                    short=nbytes <= SHORT_MESSAGE, part=part,
                )  # fmt: skip


class Rates(Data):
    """Rates of a collective for several group sizes."""

    verb: Verb
    kib: Size
    ranks: Sizes
    mib_per_ms: Times

    @model_validator(mode="after")
    def _checked(self) -> Rates:
        _in_step(self.verb, self.ranks, self.mib_per_ms)
        for rate in self.mib_per_ms:
            _slow_enough(self.verb, rate * 2**20 / 2 * 1e3, "bytes")
        return self

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        for ranks, rate in zip(self.ranks, self.mib_per_ms, strict=True):
            for part, seconds in _posted(self.verb, ranks, self.kib * 1024, cluster).items():
                yield Row(
                    source=source, panel=in_words(self.verb), series=f"by {part}",
                    axis="GPUs", size=ranks, what=f"{ranks} GPUs, {in_kib(self.kib)}", unit="MiB/ms", published=rate,
                    predicted=self.kib / 1024 / (1e3 * seconds), short=self.kib * 1024 <= SHORT_MESSAGE, part=part,
                )  # fmt: skip


class Calls(Data):
    """A causal attention kernel on one device, of a sequence or of packed documents."""

    direction: Direction
    heads: Size
    head_dim: Size
    tokens: Sizes
    """Per document."""
    packed: int = 0
    """Total of a pack; 0: one document."""
    parts: Size = 1
    """Ranks that shard the queries; one rank's call is measured."""
    milliseconds: Times

    @model_validator(mode="after")
    def _checked(self) -> Calls:
        _in_step(f"{self.direction} of {self.heads} heads", self.tokens, self.milliseconds)
        if any(self.packed % tokens for tokens in self.tokens):
            raise ValueError(f"packed = {self.packed} has no whole number of such documents")
        for tokens, ms in zip(self.tokens, self.milliseconds, strict=True):
            flops = kernel_time.flops(self._asked(tokens, "bfloat16"))
            _slow_enough(f"{self.direction} of {tokens} tokens", flops / (ms * 1e-3), "FLOPs")
        return self

    def shape(self, tokens: int) -> Shape:
        """The average rank's tile of a zigzag document."""
        queries = tokens // self.parts
        keys = (tokens + queries) // 2
        return Shape(queries, keys, keys - queries)

    def rows(self, source: str, cluster: Cluster, dtype: str) -> Iterator[Row]:
        pack = f", packs of {self.packed:,} tokens" if self.packed else ""
        whole = f"{self.heads} heads" + (f", one part of {self.parts}" if self.parts > 1 else "")
        for tokens, ms in zip(self.tokens, self.milliseconds, strict=True):
            seconds = kernel_time.seconds(self._asked(tokens, dtype), cluster.device)
            yield Row(
                source=source, panel=f"{self.direction}{pack}", series=whole, axis="tokens", size=tokens,
                what=f"{tokens:,} tokens", unit="ms", published=ms, predicted=1e3 * seconds,
                short=tokens <= SHORT_SEQUENCE, part="kernels",
            )  # fmt: skip

    def _asked(self, tokens: int, dtype: str) -> Attention:
        shapes = (self.shape(tokens),) * (self.packed // tokens or 1)
        rows = sum(shape.rows for shape in shapes)
        return Attention(self.direction, shapes, rows, self.heads, self.head_dim, self.head_dim, dtype)


class Training(Data):
    """A training step."""

    tokens: Size
    """Per sequence or pack."""
    devices: Size
    tensor: Size = 1
    pipeline: Size = 1
    context: Size = 1
    sequences: Size = 1
    """Per step."""
    documents: tuple[Size, ...] = ()
    value: Time


class Trainings(Data):
    """Training steps of one model."""

    cluster: str = ""
    """Overrides the source's."""
    model: str
    layers: int = 0
    """Overrides the model's."""
    provider: Literal["ring", "all_gather"]
    gemm_dtype: str = ""
    figure: Literal["s", "model TFLOP/s/GPU"]
    """FLOPs are counted without a mask."""
    rows_: Annotated[tuple[Training, ...], Field(min_length=1, alias="rows")]

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        of = replace(model(self.model), layers=self.layers) if self.layers else model(self.model)
        for number, step in enumerate(self.rows_):
            seconds = self._seconds(of, step, cluster)
            sizes = {"TP": step.tensor, "PP": step.pipeline, "CP": step.context}
            how = " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1)
            packed = f", {len(step.documents)} documents" if step.documents else ""
            yield Row(
                source=source, panel=f"{self.model} on {cluster.name}", series=self.provider,
                axis="" if step.documents else "tokens", size=number if step.documents else step.tokens,
                what=f"{step.tokens:,} tokens{packed}, {step.devices:,} GPUs {how}".rstrip(), unit=self.figure,
                published=step.value, short=False, part="all",
                predicted=seconds if self.figure == "s" else _unmasked_flops(of, step) / step.devices / seconds / 1e12,
            )  # fmt: skip

    def _seconds(self, of: Model, step: Training, cluster: Cluster) -> float:
        chosen: dict[str, Any] = {"gemm_dtype": self.gemm_dtype} if self.gemm_dtype else {}
        parallel = Parallel(
            devices=step.devices, tensor=step.tensor, pipeline=step.pipeline, context=step.context,
            sequence_parallel=step.tensor > 1, seq_length=step.tokens, global_batch=step.sequences,
            documents=step.documents, **chosen,
        )  # fmt: skip
        asked = problem(of, parallel)
        options = Options(layout="zigzag") if step.context > 1 else Options()
        if step.documents:
            asked, options = in_each(asked), Options()
        if self.provider == "all_gather":
            options = replace(options, head_groups=1)
        setup = settled(providers.get(self.provider), asked, options)
        attention = calls.seconds(setup, Machine(cluster), step.tensor, overlap=True)
        return iteration(of, parallel, cluster, attention).seconds


class SharedHeads(Data):
    """A kernel measured on one device, and with its heads sharded by all-to-alls."""

    ranks: Annotated[int, Field(gt=1)]
    tokens: Size
    heads: Size
    head_dim: Size
    what: tuple[str, ...]
    moved: Sizes
    """16-bit tensors moved by all-to-alls."""
    alone: Times
    """Milliseconds on one device."""
    milliseconds: Times

    @model_validator(mode="after")
    def _checked(self) -> SharedHeads:
        if len({len(self.what), len(self.moved), len(self.alone), len(self.milliseconds)}) > 1:
            raise ValueError("what, moved, alone and milliseconds must be as many")
        return self

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        nbytes = self.tokens * self.heads * self.head_dim * 2 // self.ranks
        once = _posted("all_to_all", self.ranks, nbytes, cluster)
        for i, (what, moved, alone, ms) in enumerate(
            zip(self.what, self.moved, self.alone, self.milliseconds, strict=True)
        ):
            for part, seconds in once.items():
                yield Row(
                    source=source, panel=f"{self.ranks} GPUs, {self.tokens:,} tokens", series=f"by {part}",
                    axis="", size=i, what=what, unit="ms", published=ms,
                    predicted=alone / self.ranks + 1e3 * moved * seconds, short=False, part=part,
                )  # fmt: skip


def in_words(verb: str) -> str:
    """``all_to_all`` -> ``all-to-all``."""
    return "send and receive" if verb == "send_receive" else verb.replace("_", "-")


def in_kib(kib: int) -> str:
    """Format KiB, such as ``64 MiB``."""
    steps = (("GiB", 2**20), ("MiB", 2**10), ("KiB", 1))
    name, step = next((name, step) for name, step in steps if kib >= step)
    return f"{kib // step} {name}"


def _posted(verb: Verb, ranks: int, nbytes: int, cluster: Cluster) -> dict[str, float]:
    """Seconds within a node, by part of the planner."""
    group = Group(ranks)
    match verb:
        case "all_reduce":
            return {"layers": collectives.all_reduce(cluster, group, nbytes)}
        case "all_to_all":
            layers = collectives.all_to_all(cluster, group, nbytes)
        case "send_receive":
            layers = collectives.message(cluster, 1, nbytes)
        case _:
            layers = collectives.ring(cluster, group, nbytes, verb)
    if verb == "send_receive":
        post = Post(0, "exchange", "cp", "cp", nbytes, 1, 1, 1)
    else:
        post = Post(0, verb, "cp", "cp", nbytes * (ranks - 1) // ranks, 1, None, None)
    attention = Links(cluster, {"cp": ranks}, [0] * ranks).cost(post, 0).seconds
    return {"layers": layers, "attention": attention}


def _unmasked_flops(of: Model, step: Training) -> float:
    """Model FLOPs of a step, counting masked pairs of attention."""
    masked = sum(operations.core(of, layer, step.tokens) for layer in of.all_layers)
    once = operations.training(of, step.tokens, step.sequences)
    return once + operations.FORWARD_AND_BACKWARD * step.sequences * masked


def _in_step(what: str, sizes: tuple[int, ...], values: tuple[float, ...]) -> None:
    if len(sizes) != len(values):
        raise ValueError(f"{what}: {len(values)} values for {len(sizes)} sizes")
    if list(sizes) != sorted(set(sizes)):
        raise ValueError(f"{what}: sizes must ascend")


def _slow_enough(what: str, rate: float, unit: str) -> None:
    if rate > FASTEST[unit]:
        raise ValueError(f"{what}: {rate:.2g} {unit} per second; is the time in another unit?")
