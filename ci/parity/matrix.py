"""The cases: read from ``cases.toml``, multiplied out over all providers, and what each has to train."""

from __future__ import annotations

import difflib
import tomllib
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Literal

import support
from pydantic import BaseModel, ConfigDict
from sides import Training

from cp_plugin.methods import registry as providers
from cp_plugin.placement.documents import DOCUMENTS

FILE = Path(__file__).with_name("cases.toml")
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Of Transformer Engine. The first is Megatron's default, and the measure on CUDA."""
Device = Literal["cpu", "cuda"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """What is trained."""

    flags: str = ""
    stock: str | None = None
    """Stock Megatron's flags for the same model, where they are others."""
    feature: str | None = None
    """What it asks of attention, by its name in ``support.FEATURES``."""
    documents: int = 0
    upstream: str | None = None
    """Why upstream on the CPU cannot do it."""
    wrong: str | None = None
    """Why upstream, which can do it, is no measure."""
    measure: str = "dense"
    """The model whose upstream gap is the measure where upstream cannot do this one, or is wrong."""
    kernels: tuple[str, ...] = ()
    """On the CPU, modules of ``tests/megatron`` that stand in for kernels of CUDA, on every side."""
    linear: str | None = None
    """The kind of linear attention of some layers."""
    pattern: str = "L"


class Parallel(_Strict):
    """Ranks, and how they are divided."""

    cp: int
    others: int = 1
    flags: str = ""


class Mask(_Strict):
    """What attention sees."""

    flags: str = ""
    feature: str | None = None
    upstream: str | None = None


class Group(_Strict):
    """Cases: the product of all that is listed."""

    models: tuple[str, ...]
    parallel: tuple[str, ...]
    providers: tuple[str, ...] | None = None
    """None: every provider there is."""
    layouts: bool = False
    """Each layout of each provider, instead of its default; that of documents where a model has some."""
    options: tuple[str, ...] = ("",)
    masks: tuple[str, ...] = ("causal",)
    precisions: tuple[str, ...] = ("float32",)
    devices: tuple[Device, ...] = ("cpu", "cuda")


class Refused(_Strict):
    """Combinations that the plugin refuses, and words of its message."""

    models: tuple[str, ...]
    providers: tuple[str, ...]
    says: str


class Short(_Strict):
    """The form for every change."""

    cases: tuple[str, ...]
    seeds: int
    """How many of the further seeds: a limit from fewer is never wider."""


class Base(_Strict):
    """Flags of every training."""

    common: str
    cpu: str
    cuda: str


class Case(_Strict):
    """One comparison: the plugin against CP 1, beside upstream against CP 1."""

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
    """All of ``cases.toml``."""

    steps: int
    seeds: tuple[int, ...]
    """With which CP 1 and upstream are trained, too; the plugin is with Megatron's own, 1234."""
    base: Base
    models: dict[str, Model]
    parallel: dict[str, Parallel]
    masks: dict[str, Mask]
    precisions: dict[str, str]
    groups: tuple[Group, ...]
    refused: tuple[Refused, ...] = ()
    short: Short

    def cases(self, device: Device) -> list[Case]:
        """Every case of the device, once, in the order of the file."""
        groups = [group for group in self.groups if device in group.devices]
        found = dict.fromkeys(case for group in groups for case in self._product(group))
        if device == "cuda":  # Transformer Engine's attention with context parallelism takes no float32
            found = dict.fromkeys(case.model_copy(update={"precision": "bfloat16"}) for case in found)
        return list(found)

    def chosen(self, device: Device, patterns: tuple[str, ...]) -> list[Case]:
        """The cases whose names match. Raises ValueError for a pattern that matches none, with the nearest names."""
        known = {case.name: case for case in self.cases(device)}
        found: dict[str, Case] = {}
        for pattern in patterns:
            literal = pattern.replace("[", "[[]")  # options stand in brackets, which are no pattern's here
            matching = {name: case for name, case in known.items() if fnmatchcase(name, literal)}
            if not matching:
                near = difflib.get_close_matches(pattern, known, 3, 0.4)
                hint = f"did you mean {', '.join(near)}?" if near else "--list shows all"
                raise ValueError(f"--case {pattern}: no case has that name; {hint}")
            found |= matching
        return list(found.values())

    def refusal(self, case: Case) -> str | None:
        """What the plugin must say to it, or None where it must train."""
        for feature in (self.models[case.model].feature, self.masks[case.mask].feature):
            denied = {f.name: support.cells(f) for f in support.FEATURES if f.name == feature}
            if feature is not None and denied[feature][case.provider] is not None:
                return denied[feature][case.provider]
        listed = (r.says for r in self.refused if case.model in r.models and case.provider in r.providers)
        return next(listed, None)

    def stock(self, case: Case, device: Device) -> Training:
        """The same model without context parallelism; with linear layers it is the plugin's, on one rank."""
        parallel, model = self.parallel[case.parallel], self.models[case.model]
        linear = self._linear_flags(case)
        flags = model.flags if linear or model.stock is None else model.stock
        side = "plugin" if linear else "stock"
        return self._training(side, parallel.others, case, device, f"{flags} {linear}")

    def upstream(self, case: Case, device: Device) -> dict[str, Training]:
        """By their names, the trainings of upstream; none where it cannot do it."""
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
        """Why upstream cannot do it, or None."""
        if self.linear(case) is not None:
            return "no linear attention"
        model, mask = self.models[case.model], self.masks[case.mask]
        return (model.upstream or mask.upstream) if device == "cpu" else None

    def measure(self, case: Case, device: Device) -> Case:
        """The case whose upstream gap is allowed twice: its own, or that of another model where that is no measure."""
        if self.no_upstream(case, device) is None and self.models[case.model].wrong is None:
            return case
        model = self.models[case.model].measure
        return case.model_copy(update={"model": model, "mask": "causal", "provider": "ring", "options": ""})

    def exact(self, case: Case, device: Device) -> Case | None:
        """The case in float32, where what bfloat16 costs its model is a measure too: where upstream cannot do it.

        The dense model's rounding in bfloat16 is none of another model's. In float32 it is, near one unit in the last
        place; and where upstream runs and is wrong (multi-token prediction), the dense model's is enough.
        """
        if case.precision != "bfloat16" or self.no_upstream(case, device) is None:
            return None
        return case.model_copy(update={"precision": "float32"})

    def plugin(self, case: Case, device: Device) -> Training:
        """With the plugin. Without its self-check, which would find a fault first: the comparison is to."""
        parallel, linear = self.parallel[case.parallel], self._linear_flags(case)
        if providers.get(case.provider).kind == "linear":
            softmax = "--cp-provider all_gather" if "N" in linear else ""
            chosen = f"{linear} {softmax} --cp-linear-provider {case.provider}"
        else:
            chosen = f"{linear} --cp-provider {case.provider}"
        flags = f"{self.models[case.model].flags} --context-parallel-size {parallel.cp} {chosen} {case.options}"
        return self._training("plugin", parallel.cp * parallel.others, case, device, f"{flags} --cp-selfcheck off")

    def linear(self, case: Case) -> str | None:
        """The kind of linear attention that some layers, or all, have; None for a model without."""
        return "basic" if providers.get(case.provider).kind == "linear" else self.models[case.model].linear

    def _linear_flags(self, case: Case) -> str:
        kind = self.linear(case)
        return (
            "" if kind is None else f"--cp-linear-attention {kind} --cp-layer-pattern {self.models[case.model].pattern}"
        )

    def _training(self, side: str, ranks: int, case: Case, device: Device, flags: str) -> Training:
        parts = (
            self.base.common,
            self.base.cpu if device == "cpu" else self.base.cuda,
            f"--train-iters {self.steps}",
            self.parallel[case.parallel].flags,
            self.precisions[case.precision],
            flags,
            self.masks[case.mask].flags,
        )
        words, model = " ".join(" ".join(parts).split()), self.models[case.model]
        kernels = model.kernels if device == "cpu" else ()
        return Training(side=side, ranks=ranks, flags=words, documents=model.documents, kernels=kernels)

    def _product(self, group: Group) -> list[Case]:
        names = group.providers or tuple(providers.registry())
        found = []
        for model, parallel, name, mask, precision in product(
            group.models, group.parallel, names, group.masks, group.precisions
        ):
            layouts = [x for x in providers.get(name).layouts if x != DOCUMENTS.name or self.models[model].documents]
            options = [f"--cp-layout {x}" for x in layouts] if group.layouts else group.options
            found += [
                Case(model=model, parallel=parallel, provider=name, options=chosen, mask=mask, precision=precision)
                for chosen in options
            ]
        return found


def load(file: Path = FILE) -> Matrix:
    """Raises pydantic's ValidationError for a file that is none."""
    return Matrix.model_validate(tomllib.loads(file.read_text()))
