"""Contracts: what a patch relies on in the symbol of Megatron that it replaces.

    registers   an interface that Megatron offers for such an addition: its parameters are those that the plugin serves
    wraps       calls the original: the parameters that it reads or changes are there. Where it relies on more, a probe
                calls the original with made-up arguments
    replaces    runs instead of the original: its parameters are those that the replacement takes into account, and a
                probe may run both on tiny tensors, on one rank or in Megatron's own layout (zigzag)

A run starts if the contracts of its patches hold, and stops if one is broken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["registers", "wraps", "replaces"]
Probe = Callable[[Any, Any], str | None]
"""(original, replacement) -> what differs; None: nothing that matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Made by ``registers``, ``wraps`` and ``replaces``."""

    form: Form
    parameters: tuple[str, ...] = ()
    """That the original must have; of a replacement, all that it takes into account."""
    optional: tuple[str, ...] = ()
    """Those that only some versions have."""
    probe: Probe | None = None

    def broken(self, original: Any, replacement: Any, *, probing: bool = True) -> str | None:
        """What the original does otherwise than the patch relies on; None: nothing.

        Args:
            probing: whether to run the probe, which one rank does for all.
        """
        if not self.parameters and self.probe is None and self.form == "wraps":
            return None
        try:
            found = inspect.signature(original).parameters
        except (TypeError, ValueError) as error:
            return f"its parameters cannot be read ({error})"
        if absent := [name for name in self.parameters if name not in found]:
            return f"it has no parameter {', '.join(absent)}"
        if self.form != "wraps" and (asked := [name for name in self._others(found) if _required(found[name])]):
            return f"it requires {', '.join(asked)}, which cp_plugin does not know"
        if self.probe is None or not probing:
            return None
        try:
            return self.probe(original, replacement)
        except Exception as error:  # of code that nobody has seen
            return f"its probe failed with {type(error).__name__}: {error}"

    def guarded(self, target: str, original: Callable[..., Any], replacement: Any) -> Any:
        """The replacement, which refuses values other than the defaults for parameters that it does not know."""
        if self.form != "replaces":
            return replacement
        found = inspect.signature(original)
        others = self._others(found.parameters)
        if not others:
            return replacement

        @functools.wraps(original)
        def guarded(*positional: Any, **named: Any) -> Any:
            given = found.bind(*positional, **named).arguments
            for name in others:
                if name in given and given[name] is not found.parameters[name].default:
                    raise ValueError(
                        f"{target} was called with {name}={given[name]!r}, a parameter that this Megatron added and "
                        "cp_plugin does not know: leave it out, or use --cp-provider upstream"
                    )
                named.pop(name, None)
            return replacement(*positional, **named)

        return guarded

    def _others(self, found: Mapping[str, inspect.Parameter]) -> list[str]:
        known = {"self", "cls", *self.parameters, *self.optional}
        return [name for name in found if name not in known]


def registers(*parameters: str, probe: Probe | None = None) -> Contract:
    return Contract(form="registers", parameters=parameters, probe=probe)


def wraps(*parameters: str, probe: Probe | None = None) -> Contract:
    return Contract(form="wraps", parameters=parameters, probe=probe)


def replaces(*parameters: str, probe: Probe | None = None, optional: tuple[str, ...] = ()) -> Contract:
    return Contract(form="replaces", parameters=parameters, optional=optional, probe=probe)


def _required(parameter: inspect.Parameter) -> bool:
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in fixed
