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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """One fault in one rank."""

    rank: int
    do: str
    """A key of ``ACTIONS``, with an argument after a colon: ``sleep:5``."""
    at: str = "forward"
    """A key of ``_PLACES`` (forward and backward: inside a message of attention), ``call``, or ``saving:SECONDS``."""
    step: int = 3
    """Training step; at ``call`` the number of the attention call in this process, less the self-check's."""
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

    def in_step(*args: Any) -> None:
        if _step() == planted.step:
            happen(*args)

    place, _, delay = planted.at.partition(":")
    if delay:
        _while_saving(float(delay), planted.step, happen)
    elif place == "call":
        _in_call(planted.step, happen)
    else:
        _PLACES[place](happen if place in ("start", "join") else in_step)


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


def _flip(bit: str, received: Tensors, *_: Any) -> None:
    import torch

    received[0].view(torch.int32).view(-1)[0] ^= 1 << int(bit)


def _previous_keys(_: str, received: Tensors, before: Tensors, number: int, *, of_call: bool) -> None:
    """Receive the previous message again: the last one of the previous call, or one of the same call."""
    if (number == 0) == of_call:
        for t, other in zip(received, before, strict=True):
            t.copy_(other)


def _average(*_: Any) -> None:
    import torch

    from cp_plugin.engine.kernels import fused

    fused._weight = lambda part, whole: torch.full_like(part, 0.5).unsqueeze(-1)


def _mask(_: str, batch: dict[str, Any]) -> None:
    batch["loss_mask"] = batch["loss_mask"].clone()
    batch["loss_mask"][:, 1::2] = 0


def _scale(factor: str, given: dict[str, Any]) -> None:
    given["scale"] = float(factor) * (given["scale"] or given["q"].size(-1) ** -0.5)


def _window(tokens: str, given: dict[str, Any]) -> None:
    given["window"] = (int(tokens), 0)


def _sink(score: str, given: dict[str, Any]) -> None:
    given["sink"] = given["q"].new_full((given["q"].size(2),), float(score))


def _changed(change: Callable[[Any], Any]) -> Callable[..., None]:
    """Change one of the tensors that the place passes: the argument is its name."""

    def action(which: str, given: dict[str, Any]) -> None:
        given[which] = change(given[which])

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
    "flip": _flip,
    "stale": functools.partial(_previous_keys, of_call=True),
    "late": functools.partial(_previous_keys, of_call=False),
    "average": _average,
    "roll": _changed(lambda x: x.roll(1, 1)),
    "mask": _mask,
    "turn": lambda by, given: given.update(freqs=given["freqs"].roll(int(by), 0)),
    "scale": _scale,
    "window": _window,
    "sink": _sink,
    "smaller": _changed(lambda x: 0.98 * x),
    "flipped": _changed(lambda x: x.flip(0)),
    "lost": _changed(lambda x: x * 0),
}


def _step() -> int:
    from megatron.training import global_vars

    return getattr(global_vars._GLOBAL_ARGS, "curr_iteration", -1) + 1


def _instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], object]:
    """Decorator: call the function instead of ``owner.name``, with that one as its first argument."""
    original = getattr(owner, name)

    def decorate(other: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def called(*args: Any, **named: Any) -> Any:
            return other(original, *args, **named)

        setattr(owner, name, called)

    return decorate


def _before(owner: Any, name: str, happen: Callable[[], None]) -> None:
    @_instead(owner, name)
    def first(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        happen()
        return original(*args, **named)


def _in_message(phase: str) -> Callable[[Callable[..., None]], None]:
    def put(happen: Callable[..., None]) -> None:
        from cp_plugin.engine.comm import GroupMesh

        @_instead(GroupMesh, "_deliver")
        def named(original: Callable[..., Any], mesh: GroupMesh, *given: Any, **more: Any) -> Any:
            if mesh.ledger.current_phase == phase:
                happen()
            return original(mesh, *given, **more)

    return put


def _at_received(happen: Callable[..., None]) -> None:
    """Pass the received keys and values, those of the previous message, and the message's number in the call."""
    from cp_plugin.engine.comm import GroupMesh, Pending

    count, inside = 0, False
    before: Tensors = ()

    @_instead(GroupMesh, "_exchange")
    def receiving(exchange: Callable[..., Any], mesh: Any, axis: str, tensors: Tensors, *ends: Any) -> Any:
        nonlocal inside
        if inside or mesh.ledger.current_phase != "forward":  # nested: the same message
            return exchange(mesh, axis, tensors, *ends)
        inside = True
        try:
            pending = exchange(mesh, axis, tensors, *ends)
        finally:
            inside = False

        def finish() -> Tensors:
            nonlocal before, count
            received = pending.wait()
            kept = tuple(t.clone() for t in received)
            happen(received, before, count % (mesh.axes[axis] - 1))
            before, count = kept, count + 1
            return received

        return Pending(finish)


def _in_call(number: int, happen: Callable[..., None]) -> None:
    """In that call of softmax attention, less those of the tiny step; the merge weight is restored afterwards."""
    from cp_plugin import ContextParallel
    from cp_plugin.engine.kernels import fused
    from cp_plugin.megatron.state import STATE

    weight, count = fused._weight, 0

    @_instead(ContextParallel, "attention")
    def attention(attend: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal count
        count += not STATE.trial
        if count == number:
            happen()
        try:
            return attend(*args, **named)
        finally:
            fused._weight = weight


def _at_batch(happen: Callable[..., None]) -> None:
    """Pass the sliced batch of each micro-batch."""
    from cp_plugin.megatron.models import gpt

    @_instead(gpt, "get_batch")
    def get_batch(get: Callable[..., Any], *args: Any, **named: Any) -> dict[str, Any]:
        batch = get(*args, **named)
        happen(batch)
        return batch


def _at_rotation(happen: Callable[..., None]) -> None:
    """Pass the angles by which a layer rotates its queries or keys."""
    from megatron.core.transformer import attention, multi_latent_attention

    for module in (attention, multi_latent_attention):

        @_instead(module, "apply_rotary_pos_emb")
        def rotating(rotate: Callable[..., Any], t: Any, freqs: Any, *args: Any, **named: Any) -> Any:
            given = {"freqs": freqs}
            happen(given)
            return rotate(t, given["freqs"], *args, **named)


def _at_attention(happen: Callable[..., None]) -> None:
    """Pass the arguments of softmax attention."""
    from cp_plugin import ContextParallel

    @_instead(ContextParallel, "attention")
    def attention(attend: Callable[..., Any], cp: Any, q: Any, k: Any, v: Any, **named: Any) -> Any:
        given = named | {"q": q}
        happen(given)
        return attend(cp, given.pop("q"), k, v, **given)


def _at_returned(happen: Callable[..., None]) -> None:
    """Pass the sums of dk and dv that come back from other ranks of a ring."""
    from cp_plugin.engine.comm import Pending
    from cp_plugin.engine.methods import ring

    @_instead(ring, "_added")
    def adding(added: Callable[..., Any], arriving: Any, parts: Any) -> Any:
        if arriving is None:
            return added(arriving, parts)
        returned = dict(zip(("dk", "dv"), arriving.wait(), strict=True))
        happen(returned)
        return added(Pending.done((returned["dk"], returned["dv"])), parts)


def _at_halo(phase: str) -> Callable[[Callable[..., None]], None]:
    """Pass the rows that a short convolution receives in a forward or backward."""

    def put(happen: Callable[..., None]) -> None:
        from cp_plugin.engine.attention import convolution

        @_instead(convolution, "_sent")
        def receiving(sent: Callable[..., Any], mesh: Any, *given: Any) -> Any:
            received = {"halo": sent(mesh, *given)}
            if mesh.ledger.current_phase == phase:
                happen(received)
            return received["halo"]

    return put


def _at_linear(happen: Callable[..., None]) -> None:
    """Pass q, k, v, decays and beta of linear attention, and where its documents begin and end."""
    from cp_plugin.engine.attention import linear

    @_instead(linear, "fold")
    def changed(fold: Callable[..., Any], x: Any, parts: Any, documents: Any) -> Any:
        given = x._asdict() | ({} if documents is None else documents._asdict())
        happen(given)
        documents = documents and documents._replace(starts=given["starts"], ends=given.pop("ends"))
        return fold(x._replace(**given | {"starts": None}), parts, documents)


def _at_optimizer(happen: Callable[..., None]) -> None:
    from megatron.core.optimizer.optimizer import FP32Optimizer

    _before(FP32Optimizer, "prepare_grads", happen)


def _while_saving(delay: float, step: int, happen: Callable[..., None]) -> None:
    """``delay`` seconds into the save of the step; if it had ended, at 0.7 times the delay of the next, and so on."""
    from megatron.training import training

    wait = delay

    @_instead(training, "save_checkpoint")
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


def _at_gradient(happen: Callable[..., None]) -> None:
    from megatron.core.distributed import finalize_model_grads as module
    from megatron.training import training

    for where in (module, training):
        if hasattr(where, "finalize_model_grads"):

            @_instead(where, "finalize_model_grads")
            def finalize(original: Callable[..., Any], model: Any, *args: Any, **named: Any) -> Any:
                happen(model)
                return original(model, *args, **named)


def _at_join(happen: Callable[..., None]) -> None:
    import torch.distributed as dist

    _before(dist, "init_process_group", happen)


_PLACES: dict[str, Callable[[Callable[..., None]], None]] = {
    "start": lambda happen: happen(),
    "join": _at_join,
    "forward": _in_message("forward"),
    "backward": _in_message("backward"),
    "optimizer": _at_optimizer,
    "gradient": _at_gradient,
    "received": _at_received,
    "batch": _at_batch,
    "rotation": _at_rotation,
    "attention": _at_attention,
    "returned": _at_returned,
    "halo": _at_halo("forward"),
    "returned halo": _at_halo("backward"),
    "linear": _at_linear,
}
