"""Faults planted in one rank of a training run: where, and what happens there.

    plant(Plant(rank=1, at="backward", step=3, do="kill"))      before the training starts, on every rank

A place is hooked at run time by wrapping a function of the training; neither the plugin nor Megatron knows about it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

type Tensors = tuple[Any, ...]
type Happen = Callable[..., None]
type Around = Callable[..., Any]
"""Called with what makes the fault happen, the function that it surrounds, and the arguments of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One fault in one rank."""

    rank: int
    do: str
    """A key of ``ACTIONS``, with an argument after a colon: ``sleep:5``."""
    at: str = "forward"
    """A key of ``_PLACES`` (forward and backward: inside a message of attention), ``start`` or ``saving:SECONDS``."""
    step: int = 3
    """Training step."""
    once: str = ""
    """A file: the fault happens only if it does not exist, and creates it first."""


def plant(planted: Plant, mark: Path) -> None:
    """Install the fault if this is its rank; the time at which it happens is written to ``mark``."""
    if int(os.environ["RANK"]) != planted.rank:
        return

    def happen(*args: Any) -> None:
        if planted.once:
            if os.path.exists(planted.once):
                return
            Path(planted.once).touch()
        mark.write_text(str(time.monotonic()))
        name, _, argument = planted.do.partition(":")
        ACTIONS[name](argument, *args)

    def happen_in_step(*args: Any) -> None:
        if _step() == planted.step:
            happen(*args)

    place, _, delay = planted.at.partition(":")
    if delay:
        _hook_saving(float(delay), planted.step, happen)
    elif place == "start":
        happen()
    else:
        around, *targets = _PLACES[place]
        for target in targets:
            wrap(target, functools.partial(around, happen if place == "join" else happen_in_step))


def replace(target: str, make: Callable[[Any], Any]) -> None:
    """Put what is made of it in the place of what ``module:qualified.name`` holds."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    setattr(owner, name, make(getattr(owner, name)))


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Have a function called in the place of another, with that one as its first argument."""
    replace(target, lambda original: functools.wraps(original)(lambda *args, **named: around(original, *args, **named)))


def _replace_in_module(argument: str, *_: Any) -> None:
    """``module.name=text``: replace an attribute by the text, or a function by one that returns it."""
    place, _, text = argument.partition("=")
    module, _, name = place.rpartition(".")
    owner = importlib.import_module(module)
    setattr(owner, name, (lambda: text) if callable(getattr(owner, name)) else text)


def _raise(argument: str, *_: Any) -> None:
    raise RuntimeError(argument or "planted")


def _no_memory(argument: str, *_: Any) -> None:
    import torch

    if argument == "torch":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")
    bytearray(1 << 62)


def _nan(_: str, model: Any = None) -> None:
    for chunk in model or ():
        next(p for p in chunk.parameters() if p.requires_grad).main_grad.fill_(float("nan"))


def _previous_keys(_: str, received: Tensors, before: Tensors, number: int, *, of_call: bool) -> None:
    """Receive the previous message again: the last one of the previous call, or one of the same call."""
    if (number == 0) == of_call:
        for t, other in zip(received, before, strict=True):
            t.copy_(other)


def _scale(factor: str, call: dict[str, Any]) -> None:
    call["scale"] = float(factor) * (call["scale"] or call["q"].size(-1) ** -0.5)


def _changed(change: Callable[[Any], Any]) -> Callable[..., None]:
    """Change one of the tensors that the place passes: the argument is its name."""

    def action(which: str, tensors: dict[str, Any]) -> None:
        tensors[which] = change(tensors[which])

    return action


ACTIONS: dict[str, Callable[..., None]] = {
    "kill": lambda _, *rest: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _, *rest: os.kill(os.getpid(), signal.SIGSTOP),
    "crash": lambda _, *rest: ctypes.string_at(0) and None,
    "raise": _raise,
    "memory": _no_memory,
    "exit": lambda status, *rest: os._exit(int(status)),
    "leave": lambda status, *rest: (_ for _ in ()).throw(SystemExit(int(status))),
    "sleep": lambda seconds, *rest: time.sleep(float(seconds)),
    "signal-launcher": lambda name, *rest: os.kill(os.getppid(), getattr(signal, name)),
    "nan": _nan,
    "environment": lambda words, *rest: os.environ.update(word.split("=", 1) for word in words.split()),
    "replace": _replace_in_module,
    "nothing": lambda _, *rest: None,
    "stale": functools.partial(_previous_keys, of_call=True),
    "late": functools.partial(_previous_keys, of_call=False),
    "roll": _changed(lambda x: x.roll(1, 1)),
    "turn": lambda by, angles: angles.update(freqs=angles["freqs"].roll(int(by), 0)),
    "scale": _scale,
    "smaller": _changed(lambda x: 0.98 * x),
    "flipped": _changed(lambda x: x.flip(0)),
    "lost": _changed(lambda x: x * 0),
}


def _step() -> int:
    from megatron.training import global_vars

    return getattr(global_vars._GLOBAL_ARGS, "curr_iteration", -1) + 1


def _begin(happen: Happen, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    happen()
    return original(*args, **named)


def _deliver(phase: str) -> Around:
    def deliver(happen: Happen, original: Callable[..., Any], mesh: Any, *args: Any, **named: Any) -> Any:
        if mesh.ledger.current_phase == phase:
            happen()
        return original(mesh, *args, **named)

    return deliver


class _Receive:
    """Pass the received keys and values, those of the previous message, and the message's number in the call."""

    def __init__(self) -> None:
        self.count, self.inside = 0, False
        self.before: Tensors = ()

    def __call__(
        self, happen: Happen, exchange: Callable[..., Any], mesh: Any, axis: str, tensors: Tensors, *ends: Any
    ) -> Any:
        from cp_plugin.engine.comm import Pending

        if self.inside or mesh.ledger.current_phase != "forward":  # nested: the same message
            return exchange(mesh, axis, tensors, *ends)
        self.inside = True
        try:
            pending = exchange(mesh, axis, tensors, *ends)
        finally:
            self.inside = False

        def finish() -> Tensors:
            received = pending.wait()
            kept = tuple(t.clone() for t in received)
            happen(received, self.before, self.count % (mesh.axes[axis] - 1))
            self.before, self.count = kept, self.count + 1
            return received

        return Pending(finish)


def _slice_batch(happen: Happen, get: Callable[..., Any], *args: Any, **named: Any) -> dict[str, Any]:
    """Pass the sliced batch of each micro-batch."""
    batch = get(*args, **named)
    happen(batch)
    return batch


def _rotate(happen: Happen, rotate: Callable[..., Any], t: Any, freqs: Any, *args: Any, **named: Any) -> Any:
    """Pass the angles by which a layer rotates its queries or keys."""
    angles = {"freqs": freqs}
    happen(angles)
    return rotate(t, angles["freqs"], *args, **named)


def _attend(happen: Happen, attend: Callable[..., Any], cp: Any, q: Any, k: Any, v: Any, **named: Any) -> Any:
    """Pass the arguments of softmax attention."""
    call = named | {"q": q}
    happen(call)
    return attend(cp, call.pop("q"), k, v, **call)


def _add(happen: Happen, add: Callable[..., Any], arriving: Any, parts: Any) -> Any:
    """Pass the sums of dk and dv that come back from other ranks of a ring."""
    from cp_plugin.engine.comm import Pending

    if arriving is None:
        return add(arriving, parts)
    returned = dict(zip(("dk", "dv"), arriving.wait(), strict=True))
    happen(returned)
    return add(Pending.done((returned["dk"], returned["dv"])), parts)


def _send_halo(phase: str) -> Around:
    """Pass the rows that a short convolution receives in a forward or backward."""

    def send(happen: Happen, original: Callable[..., Any], mesh: Any, *args: Any) -> Any:
        received = {"halo": original(mesh, *args)}
        if mesh.ledger.current_phase == phase:
            happen(received)
        return received["halo"]

    return send


def _fold(happen: Happen, fold: Callable[..., Any], x: Any, parts: Any, documents: Any) -> Any:
    """Pass q, k, v, decays and beta of linear attention, and where its documents begin and end."""
    tensors = x._asdict() | ({} if documents is None else documents._asdict())
    happen(tensors)
    documents = documents and documents._replace(starts=tensors["starts"], ends=tensors.pop("ends"))
    return fold(x._replace(**tensors | {"starts": None}), parts, documents)


def _finalize(happen: Happen, finalize: Callable[..., Any], model: Any, *args: Any, **named: Any) -> Any:
    happen(model)
    return finalize(model, *args, **named)


def _hook_saving(delay: float, step: int, happen: Happen) -> None:
    """``delay`` seconds into the save of the step; if it had ended, at 0.7 times the delay of the next, and so on."""
    wait = delay

    def save_checkpoint(save: Callable[..., Any], iteration: int, *args: Any, **named: Any) -> Any:
        nonlocal wait
        if iteration < step:
            return save(iteration, *args, **named)
        timer = threading.Timer(wait, happen)
        timer.start()
        result = save(iteration, *args, **named)
        timer.cancel()
        wait *= 0.7
        return result

    wrap("megatron.training.training:save_checkpoint", save_checkpoint)


_MESH = "cp_plugin.engine.comm:GroupMesh"
_HALO = "cp_plugin.engine.attention.convolution:_sent"
_PLACES: dict[str, tuple[Any, ...]] = {
    "join": (_begin, "torch.distributed:init_process_group"),
    "forward": (_deliver("forward"), f"{_MESH}._deliver"),
    "backward": (_deliver("backward"), f"{_MESH}._deliver"),
    "optimizer": (_begin, "megatron.core.optimizer.optimizer:FP32Optimizer.prepare_grads"),
    "gradient": (_finalize, "megatron.training.training:finalize_model_grads"),
    "received": (_Receive(), f"{_MESH}._exchange"),
    "batch": (_slice_batch, "cp_plugin.megatron.models.gpt:get_batch"),
    "rotation": (
        _rotate,
        "megatron.core.transformer.attention:apply_rotary_pos_emb",
        "megatron.core.transformer.multi_latent_attention:apply_rotary_pos_emb",
    ),
    "attention": (_attend, "cp_plugin.engine.attention.api:ContextParallel.attention"),
    "returned": (_add, "cp_plugin.engine.methods.ring:_added"),
    "halo": (_send_halo("forward"), _HALO),
    "returned halo": (_send_halo("backward"), _HALO),
    "linear": (_fold, "cp_plugin.engine.attention.linear:fold"),
}
"""Place -> what is called around a function of the training, and where that is."""
