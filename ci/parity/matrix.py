"""The cases of ``cases.toml``, expanded over all providers, and the training runs of each."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Literal

import support
from pydantic import BaseModel, ConfigDict
from sides import Training

from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import DOCUMENTS

FILE = Path(__file__).with_name("cases.toml")
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Of Transformer Engine; the first is Megatron's default and the measure on CUDA."""
Device = Literal["cpu", "cuda"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Strict):
    """A model, a division of the ranks, or a mask: its flags, and what else it needs."""

    flags: str = ""
    stock: str | None = None
    """Stock Megatron's flags for the same model, if they differ."""
    feature: str | None = None
    """The feature it needs, by its name in ``support.FEATURES``."""
    upstream: str | None = None
    """Why upstream on the CPU cannot run it."""
    wrong: str | None = None
    """Why upstream, though it runs, is no measure."""
    measure: str = "dense"
    """The model whose upstream gap is the measure if upstream cannot run this one or is wrong."""
    documents: int = 0
    kernels: tuple[str, ...] = ()
    """Modules of ``tests/megatron`` that replace CUDA kernels on the CPU, on every side."""
    linear: str | None = None
    """Kind of linear attention of some layers."""
    pattern: str = "L"
    cp: int = 1
    others: int = 1
    """Ranks beside those of context parallelism."""


class Group(_Strict):
    """Cases: the product of all lists."""

    models: tuple[str, ...]
    parallel: tuple[str, ...]
    providers: tuple[str, ...] | None = None
    """None: every registered provider."""
    layouts: bool = False
    """Every layout of each provider instead of its default; that of documents only for models with documents."""
    options: tuple[str, ...] = ("",)
    masks: tuple[str, ...] = ("causal",)
    precisions: tuple[str, ...] = ("float32",)
    devices: tuple[Device, ...] = ("cpu", "cuda")

    def cases(self, documents: Collection[str]) -> Iterator[Case]:
        """``documents``: models with documents."""
        names = self.providers or tuple(providers.registry())
        for model, parallel, name, mask, precision in product(
            self.models, self.parallel, names, self.masks, self.precisions
        ):
            layouts = [x for x in providers.get(name).layouts if x != DOCUMENTS.name or model in documents]
            for options in [f"--cp-layout {x}" for x in layouts] if self.layouts else self.options:
                where = {"model": model, "parallel": parallel, "mask": mask, "precision": precision}
                yield Case(**where, provider=name, options=options)


class Case(_Strict):
    """One comparison of plugin and upstream, each against CP 1."""

    model: str
    parallel: str
    provider: str
    options: str = ""
    mask: str = "causal"
    precision: str = "float32"

    @property
    def name(self) -> str:
        """``dense/cp2/ring[--cp-layout zigzag]/causal/float32``."""
        options = f"[{self.options}]" if self.options else ""
        return f"{self.model}/{self.parallel}/{self.provider}{options}/{self.mask}/{self.precision}"


class Matrix(_Strict):
    """``cases.toml``."""

    steps: int
    seeds: tuple[int, ...]
    """Further seeds for CP 1 and upstream; the plugin is trained with Megatron's, 1234."""
    base: dict[str, str]
    """Flags of every training run (``common``), and those of a device."""
    models: dict[str, Part]
    parallel: dict[str, Part]
    masks: dict[str, Part]
    precisions: dict[str, str]
    groups: tuple[Group, ...]
    refused: tuple[dict[str, Any], ...] = ()
    """Combinations that the plugin refuses: ``models``, ``providers`` (names, or a kind for all of it), and part of
    its message (``says``)."""
    short: dict[str, Any]
    """The form for every change: ``cases``, and the number of further ``seeds``; fewer never widen a limit."""

    def cases(self, device: Device) -> list[Case]:
        """Every case of the device in the order of the file, without duplicates."""
        documents = {name for name, model in self.models.items() if model.documents}
        cases = dict.fromkeys(c for group in self.groups if device in group.devices for c in group.cases(documents))
        if device == "cuda":  # Transformer Engine's attention with context parallelism takes no float32
            cases = dict.fromkeys(case.model_copy(update={"precision": "bfloat16"}) for case in cases)
        return list(cases)

    def chosen(self, device: Device, patterns: tuple[str, ...]) -> list[Case]:
        """The cases whose names match. Raises ValueError with similar names for a pattern without a match."""
        known = {case.name: case for case in self.cases(device)}
        selected: dict[str, Case] = {}
        for pattern in patterns:
            literal = pattern.replace("[", "[[]")  # brackets enclose options and are no pattern
            matching = {name: case for name, case in known.items() if fnmatchcase(name, literal)}
            if not matching:
                near = difflib.get_close_matches(pattern, known, 3, 0.4)
                hint = f"did you mean {', '.join(near)}?" if near else "--list shows all"
                raise ValueError(f"--case {pattern}: no case has that name; {hint}")
            selected |= matching
        return list(selected.values())

    def refusal(self, case: Case) -> str | None:
        """Return part of the plugin's refusal, or None if it must train."""
        for feature in (self.models[case.model].feature, self.masks[case.mask].feature):
            denied = {f.name: support.cells(f) for f in support.FEATURES if f.name == feature}
            if feature is not None and denied[feature][case.provider] is not None:
                return denied[feature][case.provider]
        names = {case.provider, providers.get(case.provider).kind}
        listed = (r["says"] for r in self.refused if case.model in r["models"] and not names.isdisjoint(r["providers"]))
        return next(listed, None)

    def stock(self, case: Case, device: Device) -> Training:
        """The same model without context parallelism; with linear layers the plugin on one rank."""
        parallel, model = self.parallel[case.parallel], self.models[case.model]
        linear = self._linear_flags(case)
        flags = model.flags if linear or model.stock is None else model.stock
        side = "plugin" if linear else "stock"
        return self._training(side, parallel.others, case, device, f"{flags} {linear}")

    def upstream(self, case: Case, device: Device) -> dict[str, Training]:
        """Upstream's training runs by name; none if it cannot run the case."""
        parallel = self.parallel[case.parallel]
        if self.no_upstream(case, device) is not None:
            return {}
        cp = f"{self.models[case.model].flags} --context-parallel-size {parallel.cp}"
        ranks = parallel.cp * parallel.others
        if device == "cpu":
            return {"PyTorch's ring": self._training("upstream", ranks, case, device, cp)}
        inner = f"--hierarchical-context-parallel-sizes 2 {parallel.cp // 2}"
        kinds = [kind for kind in COMM_TYPES if kind != "a2a+p2p" or parallel.cp >= 4]
        flags = {kind: f"--cp-comm-type {kind} {inner if kind == 'a2a+p2p' else ''}" for kind in kinds}
        return {f"TE {k}": self._training("upstream", ranks, case, device, f"{cp} {f}") for k, f in flags.items()}

    def no_upstream(self, case: Case, device: Device) -> str | None:
        """Return why upstream cannot run it, or None."""
        if self.linear(case) is not None:
            return "no linear attention"
        model, mask = self.models[case.model], self.masks[case.mask]
        return (model.upstream or mask.upstream) if device == "cpu" else None

    def measure(self, case: Case, device: Device) -> Case:
        """The case whose upstream gap sets the limit: itself, or another model's if its own is no measure."""
        if self.no_upstream(case, device) is None and self.models[case.model].wrong is None:
            return case
        model = self.models[case.model].measure
        return case.model_copy(update={"model": model, "mask": "causal", "provider": "ring", "options": ""})

    def exact(self, case: Case, device: Device) -> Case | None:
        """The case in float32 if the effect of bfloat16 on its model counts as well: where upstream cannot run it.

        The dense model's rounding in bfloat16 is no measure of another model's. In float32 it is, near one unit in the
        last place; and where upstream runs but is wrong (multi-token prediction), the dense model's suffices.
        """
        if case.precision != "bfloat16" or self.no_upstream(case, device) is None:
            return None
        return case.model_copy(update={"precision": "float32"})

    def plugin(self, case: Case, device: Device) -> Training:
        """With the plugin, without its self-check: the comparison itself must find faults."""
        parallel, linear = self.parallel[case.parallel], self._linear_flags(case)
        if providers.get(case.provider).kind == "linear":
            softmax = "--cp-provider all_gather" if "N" in linear else ""
            chosen = f"{linear} {softmax} --cp-linear-provider {case.provider}"
        else:
            chosen = f"{linear} --cp-provider {case.provider}"
        flags = f"{self.models[case.model].flags} --context-parallel-size {parallel.cp} {chosen} {case.options}"
        return self._training("plugin", parallel.cp * parallel.others, case, device, f"{flags} --cp-selfcheck off")

    def linear(self, case: Case) -> str | None:
        """Kind of linear attention in some or all layers, or None."""
        return "basic" if providers.get(case.provider).kind == "linear" else self.models[case.model].linear

    def _linear_flags(self, case: Case) -> str:
        kind = self.linear(case)
        return (
            "" if kind is None else f"--cp-linear-attention {kind} --cp-layer-pattern {self.models[case.model].pattern}"
        )

    def _training(self, side: str, ranks: int, case: Case, device: Device, flags: str) -> Training:
        parts = (
            self.base["common"],
            self.base[device],
            f"--train-iters {self.steps}",
            self.parallel[case.parallel].flags,
            self.precisions[case.precision],
            flags,
            self.masks[case.mask].flags,
        )
        words, model = " ".join(" ".join(parts).split()), self.models[case.model]
        kernels = model.kernels if device == "cpu" else ()
        return Training(side=side, ranks=ranks, flags=words, documents=model.documents, kernels=kernels)


def load(file: Path = FILE) -> Matrix:
    """Read the file; pydantic's ValidationError for an invalid one."""
    return Matrix.model_validate(tomllib.loads(file.read_text()))
