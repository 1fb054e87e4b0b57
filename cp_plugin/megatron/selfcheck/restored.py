"""Everything that a step changes beside gradients, as it was: for a step that is not to count.

generators of random numbers       torch's, Megatron's, Python's and NumPy's
modules of the model               buffers, and attributes that are plain numbers
Megatron's and the script's        plain numbers, small tensors, and containers of them: trackers of losses,
modules, classes with trackers     statistics of lengths
other objects                      timers, the rerun machine, scales of losses
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from cp_plugin.megatron.patches import patching

_SMALL = 4096  # elements of a tensor that is copied
_PLAIN = (int, float, bool, str, type(None), dist.ProcessGroup)


@contextmanager
def restored(chunks: Sequence[torch.nn.Module], objects: Iterable[Any] = ()) -> Iterator[None]:
    """Put back, at the end of the block, what the block has changed.

    Args:
        chunks: of the model.
        objects: others whose attributes are put back.
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
            back.callback(_put_back, vars(module), _plain(vars(module)))
            buffers = module._buffers
            back.callback(_put_back, buffers, {name: (x, _clone(x)) for name, x in buffers.items()})
        for module in patching.importers().values():
            if module.__name__.partition(".")[0] == "cp_plugin":
                continue
            back.callback(_put_back, vars(module), _plain(vars(module)))
            for value in list(vars(module).values()):
                if isinstance(value, type) and isinstance(kept := vars(value).get("tracker"), dict):
                    back.callback(_put_back, {"tracker": kept}, _plain({"tracker": kept}))
        timers = _timers()
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
        for one in (*timers, machine, *objects):
            if hasattr(one, "__dict__"):
                back.callback(_put_back, vars(one), _plain(vars(one)))
        yield


def _timers() -> list[Any]:
    from megatron.training import global_vars

    timers = global_vars._GLOBAL_TIMERS
    return [] if timers is None else [timers, *getattr(timers, "_timers", {}).values()]


def _plain(owner: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
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


def _put_back(owner: Any, values: dict[str, tuple[Any, Any]]) -> None:
    for name, (x, before) in values.items():
        if isinstance(x, Tensor):
            with torch.no_grad():
                x.copy_(before)
        elif isinstance(x, dict):
            x.clear()
            x.update(before)
        elif isinstance(x, list):
            x[:] = before
        elif isinstance(x, set):
            x.clear()
            x.update(before)
        if owner.get(name, owner) is not x:
            owner[name] = x
