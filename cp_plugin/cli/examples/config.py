"""The ``config.yaml`` of examples.

load("lasp2-64xa100")    an example of the package: ``names()``
load("my/folder")        a folder with a config.yaml
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cp_plugin.common import yaml_files
from cp_plugin.common.names import did_you_mean, find

FOLDER = Path(__file__).parent / "papers"
FILE = "config.yaml"
BASE = "base"
SECTIONS = ("model", "parallel", "training", "data")
DEFAULTS: Mapping[str, str | int | bool] = {
    "tokenizer-type": "NullTokenizer",
    "split": "100,0,0",
    "eval-iters": 0,
    "eval-interval": 1000,
    "log-interval": 1,
    "log-throughput": True,
}
"""Flags with defaults: token ids as they are in the dataset, all of them for training."""
SIZES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels"),
    *("vocab-size", "context-parallel-size", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
    *("micro-batch-size", "global-batch-size", "train-iters"),
)
"""Flags whose value is a whole number, 1 or more."""

Word = str | int | Annotated[float, Field(allow_inf_nan=False)]
Value = bool | Word | list[Word] | None
"""Of a flag: true for a switch; false or null removes an inherited flag; a list is several words."""
Flags = Annotated[dict[str, Value], BeforeValidator(lambda found: {} if found is None else found)]


Tokens = Annotated[int, Field(ge=1, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sections(_Strict):
    """Megatron's flags without dashes, each in one section only."""

    model: Flags = {}
    parallel: Flags = {}
    training: Flags = {}
    """Precision, optimizer, recomputation."""
    data: Flags = {}

    @model_validator(mode="after")
    def _once(self) -> Sections:
        seen: dict[str, str] = {}
        for section in SECTIONS:
            for flag in getattr(self, section):
                if flag.startswith("-") or flag != flag.lower() or "_" in flag:
                    raise ValueError(f"{section}: {flag}: write the flag without leading dashes, such as num-layers")
                if flag in seen:
                    raise ValueError(f"{flag} is in both {seen[flag]} and {section}: write it once")
                seen[flag] = section
                value = getattr(self, section)[flag]
                number = isinstance(value, int) and not isinstance(value, bool) and value > 0
                if flag in SIZES and not number and not removes(value):
                    raise ValueError(f"{section}: {flag} {value}: write a whole number, 1 or more")
        return self

    @property
    def flags(self) -> dict[str, Value]:
        return {flag: value for section in SECTIONS for flag, value in getattr(self, section).items()}


class Cluster(_Strict):
    """The cluster of the published run."""

    profile: str
    """A packaged cluster of the planner, or a file that ``cp-plugin calibrate`` wrote."""
    nodes: int = Field(ge=1, strict=True)
    per_node: int = Field(ge=1, strict=True)

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node


class OtherCluster(_Strict):
    """A variant's changes to the cluster."""

    profile: str | None = None
    nodes: int | None = Field(default=None, ge=1, strict=True)
    per_node: int | None = Field(default=None, ge=1, strict=True)


class Variant(Sections):
    """A variant's changes; None: as in the base."""

    about: str | None = None
    section: str | None = None
    cluster: OtherCluster = OtherCluster()
    published: list[str] | None = None
    lengths: list[Tokens] | None = Field(default=None, min_length=1)
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
    lengths: list[Tokens] = Field(min_length=1)
    """Tokens of a sequence, as published; the first is the default."""
    variants: dict[str, Variant] = {}
    planner_model: str = ""
    """The same model in the planner's catalogue."""

    @model_validator(mode="before")
    @classmethod
    def _names_are_words(cls, found: Any) -> Any:
        if isinstance(found, dict) and isinstance(found.get("variants"), dict):
            return {**found, "variants": {str(name): v for name, v in found["variants"].items()}}
        return found

    @model_validator(mode="after")
    def _is_complete(self) -> Config:
        if BASE in self.variants:
            raise ValueError(f"variants: {BASE} stands for the example without a variant; use another name")
        for flag, value in self.flags.items():
            if flag in SIZES and removes(value):
                raise ValueError(f"{flag}: there is no inherited value to remove; write a whole number, 1 or more")
        if "context-parallel-size" not in self.parallel:
            raise ValueError("parallel: context-parallel-size is missing")
        if "vocab-size" not in self.model:
            raise ValueError("model: vocab-size is missing: without a tokenizer, the vocabulary size must be given")
        return self


class Experiment(_Strict):
    """An example with a variant applied."""

    name: str
    variant: str
    config: Config
    about: str
    section: str
    cluster: Cluster
    flags: Flags
    lengths: list[int]
    published: list[str]
    planner_model: str

    @property
    def devices(self) -> int:
        return self.cluster.devices


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
        if variant is None or variant == BASE:
            chosen, name = Variant(), BASE
        else:
            chosen = find(f"variant of {self.name}", variant, {BASE: Variant(), **base.variants})
            name = next((known for known, one in base.variants.items() if one is chosen), BASE)
        defaults = {flag: value for flag, value in DEFAULTS.items() if flag not in base.flags}
        cluster = {**base.cluster.model_dump(), **chosen.cluster.model_dump(exclude_none=True)}
        return Experiment(
            name=self.name,
            variant=name,
            config=base,
            about=chosen.about or base.about,
            section=chosen.section or base.section,
            cluster=Cluster(**cluster),
            flags=changed({**base.flags, **defaults}, chosen.flags),
            lengths=chosen.lengths or base.lengths,
            published=base.published if chosen.published is None else chosen.published,
            planner_model=chosen.planner_model or base.planner_model,
        )


def size(flag: str, value: Value) -> int:
    """The value as a whole number, 1 or more; ValueError for any other."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"--{flag} {value}: write a whole number, 1 or more")
    return value


def removes(value: Value) -> bool:
    """Whether it takes away an inherited flag: false or null, not 0."""
    return value is None or value is False


def changed(flags: Mapping[str, Value], changes: Mapping[str, Value]) -> dict[str, Value]:
    """Flags with changes, without those removed."""
    return {flag: value for flag, value in {**flags, **changes}.items() if not removes(value)}


def names() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{FILE}"))


def examples() -> Iterator[Example]:
    return map(load, names())


def load(name: str) -> Example:
    """The example of that name, or in that folder.

    Raises:
        ValueError: for an unknown name (with the nearest), invalid YAML, and fields that are missing, unknown or of
            the wrong type (with file and field).
    """
    known = {one: FOLDER / one for one in names()}
    folder = known.get(name) or (Path(name) if name and (Path(name) / FILE).is_file() else None)
    if folder is None:
        if name and Path(name).is_dir():
            raise ValueError(f"{name}: this folder has no {FILE}, which describes an example")
        folder = find("example", name, known)
    path = folder / FILE
    found = yaml_files.read(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: fields are missing: title, about, paper, cluster, lengths, model, parallel")
    try:
        return Example(name=folder.resolve().name, folder=folder, config=Config.model_validate(found))
    except ValidationError as error:
        raise ValueError(f"{path}: {'; '.join(_told(one) for one in error.errors()[:4])}") from None


def _told(error: Any) -> str:
    """An error of pydantic in words, with the nearest name for an unknown field."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        fields = Variant if "variants" in error["loc"][:-1] else Config
        last = str(error["loc"][-1])
        return f"{where}: unknown field{did_you_mean(last, fields.model_fields)}"
    text = error["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text
