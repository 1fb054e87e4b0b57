"""Kinds of raw measurements, and what the planner predicts for each: messages, attention kernels, trainings."""

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
"""Bytes, tokens: up to these, what a message or a call costs whatever its size decides; above, rates do."""
FASTEST = {"bytes": 2e12, "FLOPs": 5e15}
"""A second: what no device reaches. Faster measurements have another unit."""
Size = Annotated[int, Field(gt=0)]
Sizes = Annotated[tuple[Size, ...], Field(min_length=1)]
Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Times = Annotated[tuple[Time, ...], Field(min_length=1)]
Verb = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send_receive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement, and what is predicted for it."""

    source: str
    panel: str
    """What is drawn together."""
    series: str
    axis: str
    """What a series goes along; empty: its rows are of several kinds."""
    size: float
    """On that axis."""
    what: str
    """The size, and whatever else tells rows of a series apart."""
    unit: str
    published: float
    predicted: float
    short: bool
    """Whether a fixed cost decides, rather than a rate."""
    part: str
    """Of the planner, that predicts it."""

    @property
    def error(self) -> float:
        """Predicted over published, minus one."""
        return self.predicted / self.published - 1


class Data(BaseModel):
    """What a file says."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Messages(Data):
    """One verb of a group on one node; sizes as nccl-tests has them."""

    verb: Verb
    ranks: Annotated[int, Field(gt=1)]
    kib: Sizes
    """Of an all-gather or a reduce-scatter the whole that is gathered or summed, else of a rank's buffer."""
    microseconds: Times

    @model_validator(mode="after")
    def _checked(self) -> Messages:
        _in_step(self.verb, self.kib, self.microseconds)
        for kib, us in zip(self.kib, self.microseconds, strict=True):
            _slow_enough(f"{self.verb} of {kib} KiB", kib * 1024 / 2 / (us * 1e-6), "bytes")
        return self

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        """By the collectives of layers, and by the links of a simulated attention, which never all-reduces."""
        for kib, us in zip(self.kib, self.microseconds, strict=True):
            nbytes = kib * 1024
            for part, seconds in _posted(self.verb, self.ranks, nbytes, cluster).items():
                yield Row(
                    source=source, panel=f"{in_words(self.verb)}, by {part}", series=f"{self.ranks} GPUs",
                    axis="bytes", size=nbytes, what=in_kib(kib), unit="us", published=us, predicted=1e6 * seconds,
                    short=nbytes <= SHORT_MESSAGE, part=part,
                )  # fmt: skip


class Rates(Data):
    """The same as rates, of several groups at one size."""

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
        """By both parts of the planner."""
        for ranks, rate in zip(self.ranks, self.mib_per_ms, strict=True):
            for part, seconds in _posted(self.verb, ranks, self.kib * 1024, cluster).items():
                yield Row(
                    source=source, panel=in_words(self.verb), series=f"by {part}",
                    axis="GPUs", size=ranks, what=f"{ranks} GPUs, {in_kib(self.kib)}", unit="MiB/ms", published=rate,
                    predicted=self.kib / 1024 / (1e3 * seconds), short=self.kib * 1024 <= SHORT_MESSAGE, part=part,
                )  # fmt: skip


class Calls(Data):
    """One attention kernel, causal, on one device: of a sequence, or of documents that are packed in one."""

    direction: Direction
    heads: Size
    head_dim: Size
    tokens: Sizes
    """Of a document."""
    packed: int = 0
    """Of all documents together; 0: there is one."""
    parts: Size = 1
    """Ranks that share the queries: the call is what one of them has."""
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
        """A rank's queries of a document, and the keys that they see in a zigzag on average."""
        queries = tokens // self.parts
        keys = (tokens + queries) // 2
        return Shape(queries, keys, keys - queries)

    def rows(self, source: str, cluster: Cluster, dtype: str) -> Iterator[Row]:
        """A row for each length."""
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
    """Of a sequence, or of a pack."""
    devices: Size
    tensor: Size = 1
    pipeline: Size = 1
    context: Size = 1
    sequences: Size = 1
    """Of a step."""
    documents: tuple[Size, ...] = ()
    value: Time


class Trainings(Data):
    """Training steps of one model."""

    cluster: str = ""
    """Instead of the source's."""
    model: str
    layers: int = 0
    """Instead of the model's."""
    provider: Literal["ring", "all_gather"]
    gemm_dtype: str = ""
    figure: Literal["s", "model TFLOP/s/GPU"]
    """Operations are counted as if attention had no mask."""
    rows_: Annotated[tuple[Training, ...], Field(min_length=1, alias="rows")]

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        """A row for each step."""
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
    """A kernel whose time on one device is measured, and its heads shared by all-to-alls."""

    ranks: Annotated[int, Field(gt=1)]
    tokens: Size
    heads: Size
    head_dim: Size
    what: tuple[str, ...]
    moved: Sizes
    """Tensors that an all-to-all moves, in 16 bits."""
    alone: Times
    """Milliseconds on one device."""
    milliseconds: Times

    @model_validator(mode="after")
    def _checked(self) -> SharedHeads:
        if len({len(self.what), len(self.moved), len(self.alone), len(self.milliseconds)}) > 1:
            raise ValueError("what, moved, alone and milliseconds must be as many")
        return self

    def rows(self, source: str, cluster: Cluster) -> Iterator[Row]:
        """By both parts of the planner."""
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
    """``all_to_all`` as ``all-to-all``."""
    return "send and receive" if verb == "send_receive" else verb.replace("_", "-")


def in_kib(kib: int) -> str:
    """``64 MiB``."""
    steps = (("GiB", 2**20), ("MiB", 2**10), ("KiB", 1))
    name, step = next((name, step) for name, step in steps if kib >= step)
    return f"{kib // step} {name}"


def _posted(verb: Verb, ranks: int, nbytes: int, cluster: Cluster) -> dict[str, float]:
    """Seconds by part of the planner, inside a node."""
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
    """Of a step, with the half of attention that the mask hides."""
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
