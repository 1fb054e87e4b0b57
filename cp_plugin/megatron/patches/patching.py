"""Patching: replaces symbols of Megatron-Core.

A ``Patch`` names a symbol, and makes its replacement if the original keeps the contract of the patch. ``wraps``,
``replaces`` and ``registers`` make one of a function of the ``Call``, beside which a reader finds it. A function is
replaced in every imported module that holds it, under any name, since Megatron and users' scripts import by value;
modules imported later find the replacement in the symbol's own module. Patches of a run and of the process (such as CPU
mode's) are undone separately.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

import torch

from cp_plugin.engine.common.versions import MEGATRON_RANGE, megatron_supported
from cp_plugin.megatron.compat import find, hybrid_pattern, megatron_version
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.state import STATE, Scope

_WITHOUT_MEGATRON = frozenset(
    {
        *("torch", "sympy", "mpmath", "numpy", "triton", "networkx", "cuda", "tensorboard", "google", "setuptools"),
        *("pytest", "_pytest", "pluggy", "hypothesis", "more_itertools", "jinja2", "yaml", "pygments", "rich", "typer"),
        *sys.stdlib_module_names,
    }
)
"""Packages whose modules hold no symbol of Megatron: 90 % of what is imported."""


Form = Literal["registers", "wraps", "replaces"]
"""Registers: an interface of Megatron's for such an addition, with the parameters that the plugin serves. Wraps: it
calls the original, which has the parameters that it reads or changes. Replaces: it runs instead of the original, and
knows all parameters that are required or set in a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known of a run when its patches are chosen."""

    settings: Settings
    args: argparse.Namespace | None = None
    """Validated; None: unknown, so that everything may be needed."""

    built: Sequence[Any] = ()
    """Models and their configurations, once a script has built them: by what it sets without a flag."""

    def has(self, *names: str) -> bool:
        """Return True if any of these arguments, or fields of a built model, is set, or may be."""
        return self.args is None or any(getattr(one, name, None) for one in (self.args, *self.built) for name in names)

    def is_compared(self) -> bool:
        """Return True if steps on N ranks are compared with those on one, by a provider's attention or Megatron's."""
        return self.settings.active or self.settings.of_stock

    @property
    def pattern(self) -> str:
        """The pattern of a hybrid model; empty for other models."""
        return hybrid_pattern(self.args, *self.built)


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement."""

    target: str
    """``"package.module:qualified.name"``."""
    make: Callable[[Any], Any]
    """original -> replacement."""
    reason: str
    """What for; shown in the start-up audit."""
    _: KW_ONLY
    form: Form = "wraps"
    parameters: tuple[str, ...] = ()
    """What the original must have; of a replacement, all that it takes into account."""
    optional: tuple[str, ...] = ()
    """Parameters that only some versions have."""
    otherwise: str = ""
    """What would go wrong if the contract were broken."""
    when: Callable[[Run], bool] = lambda run: run.settings.active
    """Which runs need it, of those that are installed with a run."""
    required: bool = True
    """Whether every version has the symbol; otherwise there is nothing to replace where it is absent."""
    package: str = "megatron-core"
    only_in: str | None = None
    """The only module where it is replaced; None: all that hold it."""

    def __call__(self, original: Any) -> Any:
        """Make the replacement."""
        return self.make(original)

    def broken(self, original: Any) -> str | None:
        """Return what the original has otherwise than the patch relies on; None: nothing."""
        if not self.parameters and self.form == "wraps":
            return None
        try:
            theirs = inspect.signature(original).parameters
        except (TypeError, ValueError) as error:
            return f"its parameters cannot be read ({error})"
        if absent := [name for name in self.parameters if name not in theirs]:
            return f"it has no parameter {', '.join(absent)}"
        fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        unknown = [x.name for x in self.others(theirs) if x.default is inspect.Parameter.empty and x.kind not in fixed]
        if unknown and self.form != "wraps":
            return f"it requires {', '.join(unknown)}, which cp_plugin does not know"
        return None

    def others(self, parameters: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
        """Return the parameters that the patch does not know."""
        return [x for name, x in parameters.items() if name not in {"self", "cls", *self.parameters, *self.optional}]


class Call:
    """One call of a replaced function."""

    def __init__(self, function: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        self._function, self._bound = function, bound

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name, including defaults."""
        return self._bound.arguments

    def __getitem__(self, name: str) -> Any:
        """An argument that every supported version has; look others up in ``arguments``."""
        return self._bound.arguments[name]

    def original(self, **changed: Any) -> Any:
        """Call the original, with some arguments changed."""
        self._bound.arguments.update(changed)
        return self._function(*self._bound.args, **self._bound.kwargs)


def _declared(
    form: Form, target: str, reason: str, parameters: str = "", *, optional: str = "", **more: Any
) -> Callable[[Callable[[Call], Any]], Patch]:
    """Decorator that makes a ``Patch`` of a function of the ``Call``; parameters and optional are separated by spaces.

    @wraps("somelib:double", "another factor", "x")
    def replace_double(call: Call) -> int:
        return 2 * call.original() + call["x"]

    What replaces refuses values other than the defaults for parameters that it does not know. While the start-up check
    computes on one rank, the original runs: what one rank trains.
    """

    def declare(replacement: Callable[[Call], Any]) -> Patch:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            from megatron.core import parallel_state  # CPU mode comes before it

            signature = inspect.signature(original)
            others = patch.others(signature.parameters) if form == "replaces" else []

            @functools.wraps(original)
            def replaced(*positional: Any, **named: Any) -> Any:
                if form == "replaces" and STATE.trial and parallel_state.get_context_parallel_world_size() == 1:
                    return original(*positional, **named)
                bound = signature.bind(*positional, **named)
                for x in others:
                    if x.name in bound.arguments and (value := bound.arguments[x.name]) is not x.default:
                        raise ValueError(
                            f"{target} was called with {x.name}={value!r}, a parameter that this Megatron added and "
                            "cp_plugin does not know: leave it out, or use --cp-provider upstream"
                        )
                return replacement(Call(original, bound))

            return replaced

        split = {"parameters": tuple(parameters.split()), "optional": tuple(optional.split())}
        patch = Patch(target, make, reason, form=form, **split, **more)
        return patch

    return declare


wraps = functools.partial(_declared, "wraps")
replaces = functools.partial(_declared, "replaces")
registers = functools.partial(_declared, "registers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is found of one patch in this Megatron."""

    patch: Patch
    owner: Any = None
    """The module or class that defines the symbol."""
    original: Any = None
    """None: this version does not have the symbol."""
    replacement: Any = None
    broken: str | None = None
    """How the contract is broken."""


def install(patches: Sequence[Patch], scope: Scope = "run") -> None:
    """Replace the symbols, all or none; patches already in place stay.

    Raises:
        ValueError: for a megatron-core outside the supported range, and for broken contracts, all of them.
    """
    _check_version()
    findings = [examine(patch) for patch in patches if replaced_at(patch.target) is None]
    if broken := [finding for finding in findings if finding.broken]:
        raise ValueError(refusal(broken))
    findings = [finding for finding in findings if finding.original is not None]
    STATE.replaced[scope] |= {finding.patch.target: finding for finding in findings}
    for finding, owner, name in _places(findings, "original"):
        if finding.patch.only_in in (None, owner.__name__):
            setattr(owner, name, finding.replacement)


def examine(patch: Patch) -> Finding:
    """Find a patch's symbol, and check the contract."""
    try:
        owner, original = find(patch.target)
    except ValueError as error:
        return Finding(patch=patch, broken=str(error) if patch.required else None)
    broken = patch.broken(original)
    replacement = None if broken else patch.make(original)
    return Finding(patch=patch, owner=owner, original=original, replacement=replacement, broken=broken)


def refusal(findings: Sequence[Finding]) -> str:
    """Return what differs, what would go wrong, and what to do, of all broken contracts."""
    packages = " and ".join(dict.fromkeys(f"{f.patch.package} {_release(f.patch.package)}" for f in findings))
    lines = [f"the plugin cannot run on this {packages}, because functions it relies on behave differently:"]
    for number, finding in enumerate(findings, 1):
        patch = finding.patch
        lines.append(f"  {number}. {patch.target} ({patch.reason}): {finding.broken}.")
        lines.append(f"     If it ran, {patch.otherwise}." if patch.otherwise else "")
    lines.append(
        "Use a Megatron without these changes, a cp_plugin release that supports them, or --cp-provider upstream"
    )
    return "\n".join(line for line in lines if line)


def undo(scope: Scope = "run") -> None:
    """Restore every original, also in modules that were imported meanwhile."""
    findings = list(STATE.replaced[scope].values())
    STATE.replaced[scope].clear()
    for finding, owner, name in _places(findings, "replacement"):
        setattr(owner, name, finding.original)


def installed(scope: Scope = "run") -> list[str]:
    """The replaced symbols, in order of installation."""
    return list(STATE.replaced[scope])


def lend(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute for a while; returns what sets it back, or the class's free, or deletes it if there was none."""
    own = name in vars(owner)
    before = vars(owner)[name] if own else getattr(owner, name, None)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if own or name not in vars(owner) else delattr(owner, name)


@contextmanager
def lent(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of Megatron's have other values in the block."""
    with ExitStack() as back:
        for name, value in values.items():
            back.callback(lend(owner, name, value))
        yield


def inner_model(chunk: torch.nn.Module) -> Any:
    """Return the model inside all wrappers: Megatron's ``unwrap_model`` stops at one it does not know."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def original(target: str) -> Any:
    """The symbol as Megatron defines it, replaced or not."""
    finding = replaced_at(target)
    return find(target)[1] if finding is None else finding.original


def replaced_at(target: str) -> Finding | None:
    """Return what has been found of a symbol that is replaced, in either scope; None: it is not."""
    return next((replaced[target] for replaced in STATE.replaced.values() if target in replaced), None)


def importers() -> dict[str, ModuleType]:
    """Name -> module, for modules that may hold a symbol of Megatron.

    Other libraries' modules are not touched: forked ranks share their memory until they read it.
    """
    names = [name for name in list(sys.modules) if name.partition(".")[0] not in _WITHOUT_MEGATRON]
    return {name: module for name in names if hasattr(module := sys.modules.get(name), "__dict__")}


def _release(package: str) -> str:
    return megatron_version() if package == "megatron-core" else version(package)


def _check_version() -> None:
    """ValueError for a megatron-core outside the supported range."""
    version = megatron_version()
    if not megatron_supported(version):
        raise ValueError(
            f"megatron-core {version} is not supported: cp_plugin needs megatron-core{MEGATRON_RANGE}. "
            f"Install one of those, or a cp_plugin release for {version}"
        )


def _places(findings: Sequence[Finding], what: str) -> Iterator[tuple[Finding, Any, str]]:
    """Every (finding, owner, name) that holds its original, or its replacement, in one pass over the modules."""
    wanted = {id(getattr(finding, what)): finding for finding in findings}
    in_classes = [(vars(finding.owner), finding.owner) for finding in findings if isinstance(finding.owner, type)]
    in_modules = [(vars(module), module) for module in importers().values()] if wanted else []
    for names, owner in (*in_classes, *in_modules):
        for name, value in list(names.items()):
            if id(value) in wanted:
                yield wanted[id(value)], owner, name
