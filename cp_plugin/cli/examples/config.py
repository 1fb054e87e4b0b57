"""The nine ``papers/*/config.yaml``: published experiments, their variants, and Megatron's flags of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cp_plugin.common import yaml_files
from cp_plugin.common.names import find

FOLDER = Path(__file__).parent / "papers"
FILE = "config.yaml"
BASE = "base"
DEFAULTS: Mapping[str, str | int | bool] = {
    "tokenizer-type": "NullTokenizer",
    "split": "100,0,0",
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
    "log-throughput": True,
}
"""Flags with defaults: token ids as they are in the dataset, all of them for training."""

Word = str | int | float
Value = bool | Word | list[Word] | None
"""Of a flag: true for a switch; null removes an inherited flag; a list is several words."""
Flags = dict[str, Value]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sections(_Strict):
    """Megatron's flags without dashes."""

    model: Flags = {}
    parallel: Flags = {}
    training: Flags = {}
    """Precision, optimizer, recomputation."""
    data: Flags = {}

    @property
    def flags(self) -> Flags:
        return {**self.model, **self.parallel, **self.training, **self.data}


class Cluster(_Strict):
    """The cluster of the published run."""

    profile: str
    """A packaged cluster of the planner."""
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


class OtherCluster(_Strict):
    """A variant's changes to the cluster."""

    profile: str | None = None
    nodes: int | None = None
    per_node: int | None = None


class Variant(Sections):
    """A variant's changes; None: as in the base."""

    about: str | None = None
    section: str | None = None
    cluster: OtherCluster = OtherCluster()
    published: list[str] | None = None
    lengths: list[int] | None = None
    planner_model: str | None = None


class Config(Sections):
    title: str
    about: str
    """The result of the experiment, differences from the paper, and assumptions where it says nothing."""
    paper: str
    """Its file in ``ci/papers/published``."""
    section: str = ""
    published: list[str] = []
    """Tables of that file."""
    cluster: Cluster
    lengths: list[int]
    """Tokens of a sequence, as published; the first is the default."""
    variants: dict[str, Variant] = {}
    planner_model: str = ""
    """The same model in the planner's catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An example with a variant applied."""

    name: str
    variant: str
    config: Config
    cluster: Cluster
    flags: Flags
    """Without those for the length, data and checkpoints."""
    lengths: list[int]
    published: list[str]
    planner_model: str

    @property
    def devices(self) -> int:
        return self.cluster.devices

    def with_length(self, seq_length: int | None = None) -> Flags:
        """The flags of a training; by default with the first length. ValueError for a length that was not published."""
        length = self.lengths[0] if seq_length is None else seq_length
        if length not in self.lengths:
            near = min(self.lengths, key=lambda n: abs(n - length))
            raise ValueError(
                f"--seq-length {length}: {self.name} ({self.variant}) has "
                f"{', '.join(map(str, sorted(self.lengths)))} (nearest: {near}); append any other to the script's "
                f"command, as --seq-length {length} --max-position-embeddings {length}"
            )
        return {**self.flags, "seq-length": length, "max-position-embeddings": length}


class Example(_Strict):
    """An example's folder and its configuration."""

    name: str
    folder: Path
    config: Config

    @property
    def variants(self) -> list[str]:
        """The base first."""
        return [BASE, *self.config.variants]

    def experiment(self, variant: str | None = None) -> Experiment:
        """Apply a variant; ValueError for an unknown one."""
        base = self.config
        known = {BASE: (BASE, Variant()), **{name: (name, one) for name, one in base.variants.items()}}
        name, chosen = find(f"variant of {self.name}", variant or BASE, known)
        defaults = {flag: value for flag, value in DEFAULTS.items() if flag not in base.flags}
        cluster = {**base.cluster.model_dump(), **chosen.cluster.model_dump(exclude_none=True)}
        return Experiment(
            name=self.name,
            variant=name,
            config=base,
            cluster=Cluster(**cluster),
            flags=changed({**base.flags, **defaults}, chosen.flags),
            lengths=chosen.lengths or base.lengths,
            published=base.published if chosen.published is None else chosen.published,
            planner_model=chosen.planner_model or base.planner_model,
        )


def changed(flags: Mapping[str, Value], changes: Mapping[str, Value]) -> Flags:
    """Flags with changes, without those that a change removes: by false or null, not 0."""
    return {flag: v for flag, v in {**flags, **changes}.items() if v is not None and v is not False}


def words(flags: Mapping[str, Value]) -> list[list[str]]:
    """The command-line words of each flag."""
    return [
        [f"--{flag}", *(() if value is True else map(str, value if isinstance(value, list) else [value]))]
        for flag, value in flags.items()
    ]


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{FILE}"))


def examples() -> Iterator[Example]:
    return map(load, names())


def load(name: str) -> Example:
    """The example of that name; ValueError for an unknown one, with the nearest."""
    folder = find("example", name, {one: FOLDER / one for one in names()})
    return Example(name=folder.name, folder=folder, config=Config.model_validate(yaml_files.read(folder / FILE)))
