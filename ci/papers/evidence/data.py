"""Published figures, loaded from TOML into ``Row``s."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cp_plugin.engine.common.names import find

PUBLISHED = Path(__file__).parents[1] / "published"
NAMES = ("attention2d", "striped", "burst", "lasp2", "magiattention")
"""Files in ``published``, in display order."""

Work = Literal["training", "prefill", "attention forward", "attention backward", "attention"]
"""A training step, a model's forward, or one layer's attention."""

Kind = Literal["ratios", "absolute times", "memory"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Method(_Data):
    """Our counterpart of a paper's method."""

    provider: str = ""
    """Empty: tensor parallelism alone."""
    layout: str | None = None
    grid: Literal["square"] | None = None
    head_groups: int | None = None
    head_parallel: int | None = None
    intra_size: int | None = None
    backward: Literal["kv", "q"] | None = None
    tensor_parallel: bool = False
    """Megatron's tensor parallelism: heads and weights are sharded, not tokens."""
    sequence_parallel: bool = False
    causal: bool = True
    """Whether masked pairs are skipped."""
    overlap: bool = True
    """Whether messages overlap with kernels."""
    attention_recomputed: float = 0
    """Fraction of attention's forward repeated in the backward."""
    gradients_summed: bool = True
    """Whether its time includes that."""
    fused_loss: bool = False
    """Whether logits are never materialised."""
    zero: Literal[0, 1, 3] = 0
    linear: str = ""
    """Kind of linear attention (``cp_plugin.engine.linear.variants``); empty: softmax."""


class Stack(_Data):
    """A cluster and its software, as far as known."""

    base: str
    """A packaged cluster."""
    override: dict[str, Any] = {}
    """Changes to it."""
    attention_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of attention's products and payloads."""
    tile: tuple[int, int] | None = None
    """Tile of queries and keys for attention that visits all tiles and skips masked ones."""
    training: dict[str, Any] = {}
    """Fields of ``cp_plugin.planner.training.parallel.Parallel``."""


class _Column(_Data):
    """Fields that a series or column may override."""

    work: Work | None = None
    model: str | None = None
    cluster: str | None = None
    devices: int | None = None
    tensor: int | None = None
    length: int | None = None
    baseline: str | None = None

    def said(self) -> dict[str, Any]:
        """The fields that are set."""
        return self.model_dump(include=set(_Column.model_fields), exclude_none=True)


Value = float | str
"""A text: why there is nothing to compare, such as ``OOM``, ``not given``, or the table that it repeats."""


class Series(_Column):
    """A row of a table, with a value per column."""

    method: str
    values: tuple[Value, ...]
    lengths: tuple[int, ...] = ()


class Table(_Column):
    """A table or figure of a paper."""

    id: str
    figure: str
    """Unit of the values, or ``speedup``."""
    lengths: tuple[int, ...] = ()
    columns: tuple[_Column, ...] = ()
    series: tuple[Series, ...]
    batch: int = 1
    """Sequences."""
    softmax_layers: int = 0
    """Period of softmax layers in a linear model; 0: none."""
    recipe: Literal["", "offload"] = ""
    """``offload``: optimizer states are in host memory."""
    attention_recomputed: float = 0
    """Minimum over all methods of the table."""

    @model_validator(mode="after")
    def _complete(self) -> Table:
        for series in self.series:
            n = len(self.columns_of(series))
            if len(series.values) != n:
                raise ValueError(f"table {self.id}, {series.method}: {len(series.values)} values for {n} columns")
        return self

    def columns_of(self, series: Series) -> tuple[_Column, ...]:
        return self.columns or tuple(_Column(length=n) for n in series.lengths or self.lengths)


class Paper(_Data):
    """A file of published figures."""

    title: str
    source: str
    methods: dict[str, Method]
    clusters: dict[str, Stack]
    tables: tuple[Table, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published figure."""

    paper: str
    table: str
    figure: str
    method: str
    baseline: str = ""
    work: str = ""
    model: str = ""
    cluster: str = ""
    devices: int = 1
    tensor: int = 1
    length: int = 0
    """Tokens per sequence."""
    batch: int
    softmax_layers: int
    recipe: str
    attention_recomputed: float
    published: float

    @property
    def kind(self) -> Kind:
        if self.figure == "GB":
            return "memory"
        return "ratios" if self.figure in ("speedup", "% of ideal") else "absolute times"

    @property
    def setting(self) -> tuple[object, ...]:
        """Key of rows whose methods are comparable."""
        return (self.cluster, self.model, self.devices, self.tensor, self.length, self.work, self.figure, self.batch)


@cache
def paper(name: str) -> Paper:
    """Load one of ``NAMES``."""
    path = PUBLISHED / f"{name}.toml"
    return Paper.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))


def names(name: str) -> tuple[str, ...]:
    """Expand a paper's name or ``all``; ValueError with the nearest names for an unknown one."""
    return find("paper", name, {**{known: (known,) for known in NAMES}, "all": NAMES})


def method(row: Row, name: str) -> Method:
    return paper(row.paper).methods[name]


def figures(table: Table) -> Iterator[tuple[Series, dict[str, Any], Value]]:
    """Each value of a table, its series, and the setting in which it was measured."""
    for series in table.series:
        for column, value in zip(table.columns_of(series), series.values, strict=True):
            yield series, table.said() | series.said() | column.said(), value


def rows(name: str) -> list[Row]:
    """The figures of a paper that are compared, in file order."""
    return [
        Row(
            paper=name,
            table=table.id,
            method=series.method,
            published=value,
            **table.model_dump(include={"figure", "batch", "softmax_layers", "recipe", "attention_recomputed"}),
            **said,
        )
        for table in paper(name).tables
        for series, said, value in figures(table)
        if not isinstance(value, str)
    ]
