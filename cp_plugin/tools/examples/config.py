"""The nine ``papers/*/config.yaml``: published experiments, their variants, and Megatron's flags of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from cp_plugin.engine.common import yaml_files
from cp_plugin.engine.common.names import find

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


class Cluster(_Strict):
    """The cluster of the published run."""

    profile: str
    """A packaged cluster of the planner."""
    nodes: int
    per_node: int


class Experiment(_Strict):
    """An example's base, or a variant of it; Megatron's flags are without dashes."""

    name: str
    variant: str
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
    planner_model: str = ""
    """The same model in the planner's catalogue."""
    model: Flags = {}
    parallel: Flags = {}
    training: Flags = {}
    """Precision, optimizer, recomputation."""
    data: Flags = {}

    @property
    def devices(self) -> int:
        return self.cluster.nodes * self.cluster.per_node

    @property
    def flags(self) -> Flags:
        """Without those for the length, data and checkpoints, and those that are removed, by false or null."""
        every = {**DEFAULTS, **self.model, **self.parallel, **self.training, **self.data}
        return {flag: value for flag, value in every.items() if value is not None and value is not False}

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


def words(flags: Mapping[str, Value]) -> list[list[str]]:
    """Return the command-line words of each flag."""
    return [
        [f"--{flag}", *(() if value is True else map(str, value if isinstance(value, list) else [value]))]
        for flag, value in flags.items()
    ]


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{FILE}"))


def load(name: str) -> dict[str, Experiment]:
    """Variant -> experiment of the example of that name, the base first; ValueError for an unknown one, with the
    nearest. A variant's sections are merged into the base's."""
    folder = find("example", name, {one: one for one in names()})
    base = yaml_files.read(FOLDER / folder / FILE) | {"name": folder}
    variants = {}
    for variant, change in {BASE: {}, **base.pop("variants", {})}.items():
        merged = {key: {**base.get(key, {}), **value} for key, value in change.items() if isinstance(value, dict)}
        variants[variant] = Experiment.model_validate({**base, **change, **merged, "variant": variant})
    return variants


def experiment(name: str, variant: str = BASE) -> Experiment:
    """Return a variant of an example; ValueError for an unknown one."""
    return find(f"variant of {name}", variant, load(name))
