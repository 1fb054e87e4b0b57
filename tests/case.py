"""The cases of ``cases.toml``: with context parallelism a training run computes what it does without (``training``)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from nightly import covering
from training import LATENT, LIMITS, MODEL, PACKED, SHORT, Record, compare, stock, train

from cp_plugin.engine.core.layout import LAYOUTS
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of ``cases.toml``."""

    name: str
    flags: str = ""
    """Of the model, and of what the run without context parallelism shares."""
    without: str = ""
    """Flags of ``MODEL`` that the model does without."""
    alone: str | None = None
    """The run's without context parallelism, if they differ."""
    by: str = ""
    """Flags of context parallelism; a provider may come first, without its flag."""
    cp: int = 4
    ranks: int = 1
    """Without context parallelism."""
    steps: int = 2
    documents: int | None = None
    """Longest document in tokens; None: short ones for packs, else Megatron's."""
    modules: tuple[str, ...] = ()
    """Installed in both runs (``training.stand_in``)."""
    sharded: bool = False
    """Whether a rank has parts of weights and gradients, so that losses alone are compared."""
    counted: bool = False
    """Whether every rank must have sent the bytes of the closed formula."""
    limits: tuple[float, ...] = LIMITS
    """Of errors, where what is sent is rounded."""
    since: str = "0.18"
    """Version of megatron-core that first has the model."""
    proves: tuple[str, ...] = ()
    """Cells of the support matrix, by feature (``support``)."""
    where: tuple[str, ...] = ("night",)

    def run(self) -> tuple[list[Record], list[Record]]:
        """Train with context parallelism and without, and compare; return the records of both."""
        documents = SHORT * (PACKED in self.flags) if self.documents is None else self.documents
        alike = {"steps": self.steps, "documents": documents}
        words = f"{self.flags} --context-parallel-size {self.cp} {self.divided}"
        got = train(self.cp * self.ranks, words, modules=self.modules, **alike)
        modules = (*self.modules, "textbook") if LATENT in self.flags else self.modules
        base = stock(self.ranks, self.flags if self.alone is None else self.alone, modules=modules, **alike)
        if self.sharded:
            got, base = ([replace(record, weights={}, grads={}) for record in each] for each in (got, base))
        compare(got, base, steps=self.steps, limits=self.limits)
        if self.counted:
            for record in got:
                assert record.sent == record.formula, record.coordinates
        assert any(record.sent for record in got)
        return got, base

    def start(self, more: str, *, steps: int = 1, prepare: Callable[[], None] | None = None) -> list[Record]:
        """Train with context parallelism alone, with ``more`` flags."""
        flags = f"{self.flags} --context-parallel-size {self.cp} {self.divided} {more}"
        model, documents = MODEL.replace(self.without, ""), SHORT * (PACKED in flags)
        return train(self.cp * self.ranks, flags, model=model, documents=documents, steps=steps, prepare=prepare)

    @property
    def divided(self) -> str:
        """Flags of context parallelism."""
        return f"--cp-provider {self.by}" if self.by and not self.by.startswith("--") else self.by


def cases() -> list[Case]:
    """Read the table, with all combinations, each once."""
    table = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())
    words: dict[str, str] = {}
    for name, text in table["words"].items():
        words[name] = text.format_map(words)
    distinct: dict[object, Case] = {}
    for group in table["group"]:
        for row in group.pop("rows", ({},)):
            for case in _combined(group | row, words):
                name = f"{group['name']}: {', '.join(filter(None, (row.get('name'), case.name)))}"
                key = replace(case, name="", since="", where=())
                distinct.setdefault((group["name"], key), replace(case, name=name))
    assert len({case.name for case in distinct.values()}) == len(distinct), "two rows have one name"
    return list(distinct.values())


def _combined(fields: dict[str, Any], words: Mapping[str, str]) -> list[Case]:
    softmax = {name: providers.get(name).layouts for name in providers.names()}
    every = {
        "every provider": list(softmax),
        "every layout": [f"{name} --cp-layout {at}" for name in softmax for at in softmax[name] if at in LAYOUTS],
        "every provider of packs": [
            f"{name} --cp-layout documents" for name in softmax if "documents" in softmax[name]
        ],
        "every linear provider": [f"--cp-linear-provider {name}" for name in providers.names("linear")],
        "every variant": [f"--cp-linear-attention {name}" for name in variants()],
    }
    lists = {}
    for key in ("cp", "flags", "by"):
        values = fields.pop(key, Case.__dataclass_fields__[key].default)
        values = values if isinstance(values, list) else [values]
        lists[key] = [one for value in values for one in every.get(value, [value])]
    combined = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    first = covering([{key: str(value) for key, value in one.items()} for one in combined], 1)
    where = tuple(fields.pop("in", "night").split())
    fields |= {key: tuple(fields[key]) for key in ("proves", "modules", "limits") if key in fields}
    fields["alone"] = fields["alone"].format_map(words) if "alone" in fields else None
    return [
        Case(
            **fields
            | {key: value.format_map(words) if isinstance(value, str) else value for key, value in one.items()}
            | {"name": ", ".join(str(one[key]) for key in lists if len(lists[key]) > 1)},
            where=where if place in first else ("night",),
        )
        for place, one in enumerate(combined)
    ]
