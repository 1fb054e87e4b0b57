"""Patching: replaces symbols of Megatron-Core whose source is known.

A ``Patch`` names a symbol and makes its replacement from the original. All originals are first compared with the
fingerprints of the supported versions; an unknown source is an error. A function is replaced in every imported module
that holds it, under any name, since Megatron and users' scripts import by value; modules imported later find the
replacement in the symbol's own module. Patches of a run and of the process (such as CPU mode's) are undone separately.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from cp_plugin.common.versions import MEGATRON_RANGE, megatron_supported
from cp_plugin.megatron.compat import find, megatron_version
from cp_plugin.megatron.patches import source
from cp_plugin.megatron.patches.fingerprints import FINGERPRINTS
from cp_plugin.megatron.state import STATE, Place, Scope

_WITHOUT_MEGATRON = frozenset(
    {
        *("torch", "sympy", "mpmath", "numpy", "triton", "networkx", "cuda", "tensorboard", "google", "setuptools"),
        *("pytest", "_pytest", "pluggy", "hypothesis", "more_itertools", "jinja2", "yaml", "pygments", "rich", "typer"),
        *sys.stdlib_module_names,
    }
)
"""Packages whose modules hold no symbol of Megatron: 90 % of what is imported."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement."""

    target: str
    """``"package.module:qualified.name"``."""
    make: Callable[[Any], Any]
    """original -> replacement."""
    reason: str
    """Shown in the start-up audit."""
    _: KW_ONLY
    known: Mapping[str, Sequence[str]] | None = None
    """Fingerprint -> versions, for symbols of other packages; None: ``FINGERPRINTS``."""
    package: str = "megatron-core"
    only_in: str | None = None
    """The only module where it is replaced; None: all that hold it."""
    versions: Callable[[str], bool] | None = None
    """Whether a version of the package needs the patch; None: all do."""
    in_file: bool = False
    """Compare the source in the module's file, since this process has another object under the name."""


class Call:
    """One call of a replaced function."""

    def __init__(self, function: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        bound.apply_defaults()
        self._function, self._bound = function, bound

    @property
    def arguments(self) -> dict[str, Any]:
        """By name, including defaults."""
        return self._bound.arguments

    def __getitem__(self, name: str) -> Any:
        """An argument that every supported version has; look others up in ``arguments``."""
        return self._bound.arguments[name]

    def original(self, **changed: Any) -> Any:
        """Call the original, with some arguments changed."""
        self._bound.arguments.update(changed)
        return self._function(*self._bound.args, **self._bound.kwargs)


def around(replacement: Callable[[Call], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a ``Patch.make`` of a function of the ``Call``.

    @around
    def replace_double(call: Call) -> int:
        return 2 * call.original() + call["x"]
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def replaced(*positional: Any, **named: Any) -> Any:
            return replacement(Call(original, signature.bind(*positional, **named)))

        return replaced

    return make


def install(patches: Sequence[Patch], scope: Scope = "run") -> None:
    """Replace the symbols, all or none; patches already in place stay.

    Raises:
        ValueError: for a megatron-core outside the supported range, a missing symbol, or an unknown source.
    """
    check_version()
    here = of_this_version(patches)
    new = [patch for patch in here if not any(patch.target in replaced for replaced in STATE.replaced.values())]
    found = [(patch, *find(patch.target)) for patch in new]
    for patch, _, original in found:
        _check_source(patch, original)
    holders = _holders([original for _, owner, original in found if not isinstance(owner, type)])
    made: dict[str, list[Place]] = {}
    for patch, owner, original in found:
        name = patch.target.rpartition(":")[2].rpartition(".")[2]
        places = [(owner, name)] if isinstance(owner, type) else holders[id(original)]
        if patch.only_in is not None:
            places = [(module, name) for module, name in places if module.__name__ == patch.only_in]
        replacement = patch.make(original)
        made[patch.target] = [Place(where, name, original, replacement) for where, name in places]
    for target, places in made.items():
        STATE.replaced[scope][target] = places
        for place in places:
            setattr(place.owner, place.name, place.replacement)


def undo(scope: Scope = "run") -> None:
    """Restore every original, in reverse order."""
    active = STATE.replaced[scope]
    firsts = [places[0] for places in active.values() if not isinstance(places[0].owner, type)]
    holders = _holders([first.replacement for first in firsts])  # includes modules imported meanwhile
    while active:
        _, places = active.popitem()
        for place in places:
            if vars(place.owner).get(place.name) is place.replacement:
                setattr(place.owner, place.name, place.original)
        for owner, name in holders.get(id(places[0].replacement), ()):
            setattr(owner, name, places[0].original)


def of_this_version(patches: Sequence[Patch]) -> list[Patch]:
    """The patches that the installed versions need."""
    return [patch for patch in patches if patch.versions is None or patch.versions(_release(patch.package))]


def installed(scope: Scope = "run") -> list[str]:
    """The replaced symbols, in order of installation."""
    return list(STATE.replaced[scope])


def lend(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of Megatron's for the length of a check; returns what sets it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def original(target: str) -> Any:
    """The symbol as Megatron defines it, replaced or not."""
    for replaced in STATE.replaced.values():
        if target in replaced:
            return replaced[target][0].original
    return find(target)[1]


def importers() -> dict[str, ModuleType]:
    """Name -> module, for modules that may hold a symbol of Megatron.

    Other libraries' modules are not touched: forked ranks share their memory until they read it.
    """
    names = [name for name in list(sys.modules) if name.partition(".")[0] not in _WITHOUT_MEGATRON]
    return {name: module for name in names if hasattr(module := sys.modules.get(name), "__dict__")}


def _release(package: str) -> str:
    return megatron_version() if package == "megatron-core" else version(package)


def check_version() -> None:
    """ValueError for a megatron-core outside the supported range."""
    version = megatron_version()
    if not megatron_supported(version):
        raise ValueError(
            f"megatron-core {version} is not supported: cp_plugin needs megatron-core{MEGATRON_RANGE}. "
            f"Install one of those, or a cp_plugin release for {version}"
        )


def _check_source(patch: Patch, original: Any) -> None:
    known = FINGERPRINTS.get(patch.target, {}) if patch.known is None else patch.known
    try:
        if patch.in_file:
            module = patch.target.partition(":")[0]
            root = Path(str(sys.modules[module].__file__)).parents[module.count(".")]
            found = source.of_file(root, patch.target)
        else:
            found = source.of_object(original)
    except (OSError, TypeError) as error:
        found = f"unreadable ({error})"
    if found not in known:
        versions = sorted({version for listed in known.values() for version in listed})
        raise ValueError(
            f"{patch.target} of {patch.package} {_release(patch.package)} has a source that cp_plugin does not know "
            f"(fingerprint {found}; known for {', '.join(versions) or 'no version'}), and cp_plugin replaces it: "
            f"{patch.reason}. Either this {patch.package} is newer than this cp_plugin, or it was edited, or another "
            f"extension has replaced the symbol first. Use an unmodified supported {patch.package}, or compare the "
            "sources and regenerate the table with `python -m cp_plugin.megatron.patches.digest`"
        )


def _holders(symbols: Sequence[Any]) -> dict[int, list[tuple[Any, str]]]:
    """id of each symbol -> every (module, name) that holds this object, in one pass over the modules."""
    found: dict[int, list[tuple[Any, str]]] = {id(symbol): [] for symbol in symbols}
    for module in importers().values() if found else ():
        for name, value in list(vars(module).items()):
            if id(value) in found:
                found[id(value)].append((module, name))
    return found
