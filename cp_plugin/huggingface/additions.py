"""What others hang on a model after ``apply`` has examined it: examined, too, after the first compared call with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
        self.known = {key for key, *_ in _additions(model)}

    @contextmanager
    def examined(self, division: Division) -> Iterator[None]:
        """After the call in the ``with`` block examine the model, if there is anything new on any rank. Collective.
        ValueError on every rank, if the model with it cannot be divided.

        Hooks are watched in the call: most only look, and are left alone.
        """
        acting: dict[Any, str] = {}
        with ExitStack() as undo:
            for key, name, hooks, number in list(_additions(self.model)):
                if number is not None and key not in self.known:
                    undo.callback(_put_back, hooks, number, hooks[number])
                    hooks[number] = partial(_watched, hooks[number], partial(acting.setdefault, key, name))
            yield
        self._look(division, acting)

    @eager
    def _look(self, division: Division, acting: dict[Any, str]) -> None:
        effects = {key: name for key, name, _, number in _additions(self.model) if number is None} | acting
        new = {key: name for key, name in effects.items() if key not in self.known}
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


def _put_back(hooks: Any, number: int, hook: Any) -> None:
    if number in hooks:  # it may have removed itself
        hooks[number] = hook


def _watched(hook: Any, note: Callable[[], Any], *args: Any) -> Any:
    """Call the hook; ``note`` if it changes something."""
    tensors = [x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and not x.is_inference()]
    versions = [x._version for x in tensors]
    result = hook(*args)
    if (result is not None and result is not args[-1]) or versions != [x._version for x in tensors]:
        note()
    return result


def _additions(model: nn.Module) -> Iterator[tuple[Any, str, Any, int | None]]:
    """Return what tells it apart, a name, and of a hook the mapping that it is in, and its number there."""
    for where, layer in model.named_modules():
        kind = next(x for x in type(layer).__mro__ if not x.__module__.startswith("torch.distributed"))
        things = {f"the forward of {where or 'the model'}": vars(layer).get("forward"), where: kind}
        loss = None if where else getattr(model, "loss_function", None)
        things["the loss_function"] = getattr(loss, "__func__", loss)  # a bound method is another at each look
        objects: list[tuple[str, Any, Any, int | None]]
        objects = [(name, what, None, None) for name, what in things.items() if what is not None]
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            name = f"a hook of {type(layer).__name__} {where}".strip()
            objects += [(name, hook, hooks, number) for number, hook in hooks.items()]
        for name, what, hooks, number in objects:
            origin = str(getattr(what, "__module__", None) or type(what).__module__)
            if origin.split(".")[0] not in ("torch", "accelerate", "cp_plugin"):
                yield (where, id(what)), f"{getattr(what, '__qualname__', type(what).__name__)}, {name}", hooks, number
