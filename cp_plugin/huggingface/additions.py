"""What others hang on a model after ``apply`` has examined it: examined, too, after the first compared call with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cp_plugin.attention import agreement
from cp_plugin.common.eager import eager
from cp_plugin.huggingface.attention import Division

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KNOWN_SOURCES = ("torch", "accelerate", "cp_plugin")


class Additions:
    """Hooks that change something, forwards, kinds of layers, and the loss."""

    def __init__(self, model: PreTrainedModel, examine: Callable[[PreTrainedModel, Division], None]) -> None:
        """
        Args:
            examine: collective.
        """
        self.model, self.examine = model, examine
        self.known = set(_others(model)) | {key for _, _, _, key in _hooks(model)}
        self._acting: dict[Any, str] = {}
        self._watched: list[tuple[MutableMapping[int, Any], int, Any, Any]] = []

    @eager
    def watch(self) -> None:
        """Find out which new hooks change something: most only look, and are left alone."""
        for name, hooks, number, key in _hooks(self.model):
            if key not in self.known:
                hook = hooks[number]
                hooks[number] = watched = self._watching(hook, key, f"{_named(hook)}, a hook of {name}")
                self._watched.append((hooks, number, hook, watched))

    @eager
    def unwatch(self) -> None:
        for hooks, number, hook, watched in self._watched:
            if hooks.get(number) is watched:
                hooks[number] = hook
        self._watched.clear()

    def _watching(self, hook: Any, key: Any, name: str) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            tensors = [x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and not x.is_inference()]
            versions = [x._version for x in tensors]
            result = hook(*args)
            if (result is not None and result is not args[-1]) or versions != [x._version for x in tensors]:
                self._acting[key] = name
            return result

        return watched

    @eager
    def look(self, division: Division) -> None:
        """Examine the model if there is anything new on any rank. Collective.

        Raises:
            ValueError: on every rank, if the model with it cannot be divided.
        """
        found, self._acting = _others(self.model) | self._acting, {}
        new = {key: name for key, name in found.items() if key not in self.known}
        if not bool(agreement.gathered(division.cp.mesh, torch.tensor([bool(new)])).any()):
            return
        names, before, self.known = ", ".join(list(new.values())[:3]) or "something", self.known, self.known | {*new}
        if any(type(p).__name__ == "DTensor" or not p.numel() for p in self.model.parameters()):
            warnings.warn(
                f"cp_plugin: {names} came after huggingface.apply, and cannot be examined where parameters are "
                "sharded: whether it is right on shards is not known",
                stacklevel=2,
            )
            return
        calls, division.calls = division.calls, agreement.Calls()
        try:
            with torch.autocast(self.model.device.type, enabled=False):
                self.examine(self.model, division)
        except ValueError as error:
            self.known = before
            raise ValueError(f"after huggingface.apply came {names}: {error}") from error
        finally:
            division.calls = calls


def _hooks(model: nn.Module) -> Iterator[tuple[str, MutableMapping[int, Any], int, Any]]:
    """Others' forward hooks: where, the mapping they are in, their number there, and what tells them apart."""
    for name, layer in model.named_modules():
        hooks: MutableMapping[int, Any]
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            for number, hook in list(hooks.items()):
                if _is_others(hook):
                    yield f"{type(layer).__name__} {name}".strip(), hooks, number, (name, id(hook))


def _others(model: nn.Module) -> dict[Any, str]:
    """Their other things: what tells it apart -> a name."""
    found: dict[Any, str] = {}
    for name, layer in model.named_modules():
        forward = vars(layer).get("forward")
        kind = next(x for x in type(layer).__mro__ if not x.__module__.startswith("torch.distributed"))
        for what, where in ((forward, f"the forward of {name or 'the model'}"), (kind, name)):
            if what is not None and _is_others(what):
                found[name, id(getattr(what, "__func__", what))] = f"{_named(what)}, {where}"
    loss = getattr(model, "loss_function", None)
    return found if loss is None else found | {("loss", id(loss)): f"{_named(loss)}, the loss_function"}


def _is_others(what: Any) -> bool:
    origin = str(getattr(what, "__module__", None) or type(what).__module__)
    return origin.split(".")[0] not in _KNOWN_SOURCES


def _named(what: Any) -> str:
    return str(getattr(what, "__qualname__", type(what).__name__))
