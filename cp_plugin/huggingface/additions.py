"""What others hang on a model after ``apply`` has examined it: examined, too, after the first compared call with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cp_plugin.engine.attention.agreement import Calls, gathered
from cp_plugin.engine.common.eager import eager
from cp_plugin.huggingface.attention import Division

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Additions:
    """Hooks that change something, forwards, kinds of layers, and the loss."""

    def __init__(self, model: PreTrainedModel, examine: Callable[[PreTrainedModel, Division], None]) -> None:
        """examine: collective."""
        self.model, self.examine = model, examine
        self.known = {*_others(model), *(key for _, _, key, _ in _hooks(model))}
        self._acting: dict[Any, str] = {}
        self._watched: list[tuple[Any, int, Any]] = []

    @eager
    def watch(self) -> None:
        """Find out which new hooks change something: most only look, and are left alone."""
        for hooks, number, key, name in _hooks(self.model):
            if key not in self.known:
                self._watched.append((hooks, number, hooks[number]))
                hooks[number] = partial(self._call, hooks[number], key, name)

    @eager
    def unwatch(self) -> None:
        for hooks, number, hook in self._watched:
            if number in hooks:  # it may have removed itself
                hooks[number] = hook
        self._watched.clear()

    def _call(self, hook: Any, key: Any, name: str, *args: Any) -> Any:
        tensors = [x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and not x.is_inference()]
        versions = [x._version for x in tensors]
        result = hook(*args)
        if (result is not None and result is not args[-1]) or versions != [x._version for x in tensors]:
            self._acting[key] = name
        return result

    @eager
    def look(self, division: Division) -> None:
        """Examine the model if there is anything new on any rank. Collective. ValueError on every rank, if the model
        with it cannot be divided."""
        found, self._acting = _others(self.model) | self._acting, {}
        new = {key: name for key, name in found.items() if key not in self.known}
        if not bool(gathered(division.cp.mesh, torch.tensor([bool(new)])).any()):
            return
        names, calls, division.calls = ", ".join(list(new.values())[:3]) or "something", division.calls, Calls()
        known, self.known = self.known, self.known | {*new}
        try:
            if any(type(p).__name__ == "DTensor" or not p.numel() for p in self.model.parameters()):
                warnings.warn(
                    f"cp_plugin: {names} came after huggingface.apply, and is not examined, since parameters are "
                    "sharded: call apply last, before sharding them",
                    stacklevel=2,
                )
            else:
                with torch.autocast(self.model.device.type, enabled=False):
                    self.examine(self.model, division)
        except ValueError as error:
            self.known = known
            raise ValueError(f"after huggingface.apply came {names}: {error}") from error
        finally:
            division.calls = calls


def _hooks(model: nn.Module) -> Iterator[tuple[Any, int, Any, str]]:
    """Others' forward hooks: the mapping they are in, their number there, what tells them apart, and a name."""
    for where, layer in model.named_modules():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for number, hook in list(hooks.items()):
                if _is_others(hook):
                    name = f"{_named(hook)}, a hook of {type(layer).__name__} {where}".strip()
                    yield hooks, number, (where, id(hook)), name


def _others(model: nn.Module) -> dict[Any, str]:
    """Their other things: what tells it apart -> a name."""
    found: dict[Any, str] = {}
    for where, layer in model.named_modules():
        kind = next(x for x in type(layer).__mro__ if not x.__module__.startswith("torch.distributed"))
        things = {f"the forward of {where or 'the model'}": vars(layer).get("forward"), where: kind}
        things["the loss_function"] = None if where else getattr(model, "loss_function", None)
        for name, what in things.items():
            if what is not None and _is_others(what):
                found[where, id(getattr(what, "__func__", what))] = f"{_named(what)}, {name}"
    return found


def _is_others(what: Any) -> bool:
    origin = str(getattr(what, "__module__", None) or type(what).__module__)
    return origin.split(".")[0] not in ("torch", "accelerate", "cp_plugin")


def _named(what: Any) -> str:
    return str(getattr(what, "__qualname__", type(what).__name__))
