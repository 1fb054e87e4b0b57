"""Everything that a step changes beside gradients, as it was: for a step that is not to count.

generators of random numbers       torch's, Megatron's, Python's and NumPy's
modules of the model               buffers, and attributes that are plain numbers
Megatron's and the script's        plain numbers, small tensors, and containers of them: trackers of losses,
modules, classes with trackers     statistics of lengths
what the script can reach          the same of its objects, functions and classes; its generators; caches are cleared,
                                   new names dropped
other objects                      timers, the rerun machine, scales of losses
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.tensor_parallel import random as megatron_random
from megatron.training import global_vars
from torch import Tensor

from cp_plugin.megatron.patches import patching

_SMALL = 4096  # elements of a tensor that is copied
_ELSEWHERE = frozenset({"torch", "builtins", "numpy", "transformer_engine_torch", "cp_plugin", "functools", "types"})
"""Packages whose objects hold no process group of Megatron's, and nothing that a step changes."""
_OWN_SCRIPTS = "cp_plugin.megatron.models"
_PLAIN = (int, float, bool, str, type(None), dist.ProcessGroup)


@contextmanager
def restored(chunks: Sequence[torch.nn.Module], objects: Iterable[Any] = ()) -> Iterator[None]:
    """Put back, at the end of the block, what the block has changed.

    Args:
        chunks: of the model.
        objects: others whose attributes are put back, such as the script's functions.
    """
    with ExitStack() as back:
        back.callback(random.setstate, random.getstate())
        back.callback(numpy.random.set_state, numpy.random.get_state())
        back.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_available():
            back.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state())
        tracker = megatron_random.get_cuda_rng_tracker()
        back.callback(tracker.set_states, copy.copy(tracker.get_states()))
        for module in (module for chunk in chunks for module in chunk.modules()):
            buffers = module._buffers
            back.callback(_put_back, buffers, {name: (x, _clone(x)) for name, x in buffers.items()})
        for module in patching.importers().values():
            if module.__name__.partition(".")[0] == "cp_plugin":
                continue
            back.callback(_put_back, vars(module), _plain(vars(module)))
            for value in list(vars(module).values()):
                if isinstance(value, type) and isinstance(kept := vars(value).get("tracker"), dict):
                    back.callback(_put_back, {"tracker": kept}, _plain({"tracker": kept}))
        machine, timers = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE, global_vars._GLOBAL_TIMERS
        for names in namespaces([*chunks, timers, *getattr(timers, "_timers", {}).values(), machine, *objects]):
            back.callback(_put_back, names, _plain(names))
            back.callback(_forget_new, names, set(names))
            for value in list(names.values()):
                if (state := _state_of(value)) is not None:
                    back.callback(*state)
                elif isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
                    back.callback(value.cache_clear)
        yield


def namespaces(roots: Iterable[Any]) -> list[MutableMapping[str, Any]]:
    """Names and values of all that can be reached: modules of a model, helper objects, and a script's own.

    A function of the script leads to its module, closure and attributes; an instance to its attributes. Megatron's
    functions and classes, and those of libraries, lead to their closures only.
    """
    reached: dict[int, MutableMapping[str, Any]] = {}
    seen: dict[int, Any] = {}  # kept, so that numbers stay unique
    stack: list[Any] = list(roots)

    def add(owner: Any, names: MutableMapping[str, Any]) -> None:
        reached[id(owner)] = names
        stack.extend(names.values())

    while stack:
        owner = stack.pop()
        if isinstance(owner, str | bytes | int | float | Tensor | None) or id(owner) in seen:
            continue
        seen[id(owner)] = owner
        if isinstance(owner, list | tuple | set | frozenset | deque):
            stack.extend(owner)
        elif isinstance(owner, dict):
            stack.extend(owner.values())
        elif isinstance(owner, FunctionType):
            add(owner, vars(owner))
            if owner.__closure__:
                add(owner.__closure__, _closure(owner))
            if _is_of_script(owner.__module__):
                stack.append(sys.modules.get(owner.__module__))
        elif isinstance(owner, MethodType):
            stack += [owner.__self__, owner.__func__]
        elif isinstance(owner, functools.partial):
            stack += [owner.func, *owner.args]
            add(owner, owner.keywords)
        elif isinstance(owner, ModuleType):
            if _is_of_script(owner.__name__):
                add(owner, vars(owner))
        elif isinstance(owner, type):
            if _is_of_script(owner.__module__):
                add(owner, _Names(lambda owner=owner: vars(owner), partial(setattr, owner), partial(delattr, owner)))
        elif hasattr(owner, "__dict__") and _holds_state(owner):
            add(owner, vars(owner))
            stack.append(type(owner))
    return list(reached.values())


def _holds_state(x: Any) -> bool:
    module = type(x).__module__
    if isinstance(x, torch.nn.Module) or _is_of_script(module):
        return True
    return str(module).partition(".")[0] not in _ELSEWHERE and not isinstance(x, dist.ProcessGroup)


def _is_of_script(module: object) -> bool:
    module = module if isinstance(module, str) else "builtins"  # generated code has none
    first = module.partition(".")[0]
    return first not in patching._WITHOUT_MEGATRON | _ELSEWHERE | {"megatron"} or module.startswith(_OWN_SCRIPTS)


class _Names(MutableMapping[str, Any]):
    """Names and values that are not kept in a dictionary of their owner."""

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], put: Callable[[str, Any], None], drop: Callable[[str], None]
    ) -> None:
        self._read, self._put, self._drop = read, put, drop

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._drop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._read()))

    def __len__(self) -> int:
        return len(self._read())


def _closure(function: FunctionType) -> _Names:
    """The variables of a function that belong to those around it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def read() -> dict[str, Any]:
        values = {}
        for name, cell in cells.items():
            with suppress(ValueError):  # it has no value yet
                values[name] = cell.cell_contents
        return values

    return _Names(
        read,
        lambda name, value: setattr(cells[name], "cell_contents", value),
        lambda name: delattr(cells[name], "cell_contents"),
    )


def _state_of(x: Any) -> tuple[Callable[..., Any], Any] | None:
    """Return what puts a generator of random numbers back, and with what; None: of another kind."""
    if isinstance(x, torch.Generator | numpy.random.RandomState):
        return x.set_state, x.get_state()
    if isinstance(x, random.Random):
        return x.setstate, x.getstate()
    if isinstance(x, numpy.random.Generator):
        return partial(setattr, x.bit_generator, "state"), x.bit_generator.state
    return None


def _forget_new(owner: MutableMapping[str, Any], names: set[str]) -> None:
    for name in [name for name in owner if name not in names]:
        del owner[name]


def _plain(owner: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> value, and a copy of it; of what can be copied."""
    return {name: (x, _clone(x)) for name, x in owner.items() if not name.startswith("__") and _is_plain(x)}


def _is_plain(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() <= _SMALL and not isinstance(x, torch.nn.Parameter) and not x.requires_grad
    if type(x) in (list, tuple, set):
        return len(x) <= _SMALL and all(map(_is_plain, x))
    if type(x) in (dict, defaultdict):  # others may do more when they are changed
        return len(x) <= _SMALL and all(map(_is_plain, x.values()))
    return isinstance(x, _PLAIN)


def _clone(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, dict):
        new = copy.copy(x)
        for key, value in x.items():
            new[key] = _clone(value)
        return new
    return type(x)(map(_clone, x)) if type(x) in (list, tuple, set) else x


def _put_back(owner: MutableMapping[str, Any], values: dict[str, tuple[Any, Any]]) -> None:
    for name, (x, before) in values.items():
        if isinstance(x, Tensor):
            with torch.no_grad():
                x.copy_(before)
        elif isinstance(x, dict | set):
            x.clear()
            x.update(before)
        elif isinstance(x, list):
            x[:] = before
        if owner.get(name, owner) is not x:
            owner[name] = x
