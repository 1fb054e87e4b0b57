"""Contracts: what a patch relies on in the symbol of Megatron that it replaces.

    registers   an interface that Megatron offers for such an addition: its parameters are those that the plugin serves
    wraps       calls the original: the parameters that it reads or changes are there
    replaces    runs instead of the original: it has all parameters that are required, or set in a call

A run starts if the contracts of its patches hold, and stops if one is broken. Whether the patched Megatron computes as
on one rank, where the originals run, the start-up check tells (``selfcheck.step``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["registers", "wraps", "replaces"]


@dataclass(frozen=True, slots=True)
class Contract:
    """What a patch relies on."""

    form: Form = "wraps"
    parameters: tuple[str, ...] = ()
    """That the original must have; of a replacement, all that it takes into account."""
    optional: tuple[str, ...] = ()
    """Those that only some versions have."""

    def broken(self, original: Any) -> str | None:
        """What the original has otherwise than the patch relies on; None: nothing."""
        if not self.parameters and self.form == "wraps":
            return None
        try:
            found = inspect.signature(original).parameters
        except (TypeError, ValueError) as error:
            return f"its parameters cannot be read ({error})"
        if absent := [name for name in self.parameters if name not in found]:
            return f"it has no parameter {', '.join(absent)}"
        if self.form != "wraps" and (asked := [name for name in self.others(found) if _required(found[name])]):
            return f"it requires {', '.join(asked)}, which cp_plugin does not know"
        return None

    def others(self, found: Mapping[str, inspect.Parameter]) -> list[str]:
        """Return the parameters that the patch does not know."""
        known = {"self", "cls", *self.parameters, *self.optional}
        return [name for name in found if name not in known]


def _required(parameter: inspect.Parameter) -> bool:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in fixed
