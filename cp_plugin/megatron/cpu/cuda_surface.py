"""CPU stand-ins for the parts of CUDA that a Megatron training uses.

    surface()   dotted name under `torch` -> stand-in while CPU mode is on
    OnCpu       function mode: a "cuda" device argument of any torch function means "cpu"

Queries (is there a device, how much memory) are answered for the CPU. Streams, events and synchronization are no-ops,
since CPU operations are complete when they return; events keep real time for timers. The "CUDA" generator *is* the CPU
generator: otherwise weights and dropout would not depend on Megatron's seeds.

Names that are not in the table still raise torch's own error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


def _answer(value: Any) -> Callable[..., Any]:
    """A new function for each name: torch._dynamo refuses one function under two of its rules."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    device = torch.device("cpu")
    __init__ = __exit__ = synchronize = wait_stream = wait_event = _answer(None)
    query = _answer(True)

    def __enter__(self) -> Stream:
        return self

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """An event that keeps the time of its recording."""

    wait = synchronize = _answer(None)
    query = _answer(True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.record()

    def record(self, stream: object = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return (end._time - self._time) * 1e3


class _AnyGenerator(type(torch.Generator)):
    """Make torch's generators instances of the stand-in, and the stand-in a factory of torch's."""

    _real = torch.Generator

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, cls._real)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return cls._real(device=replace_cuda(device))


class Generator(torch.Generator, metaclass=_AnyGenerator):
    """A generator of random numbers, on the CPU."""


class OnCpu(TorchFunctionMode):
    """Map CUDA devices (name, torch.device or index) in arguments of torch functions to the CPU.

    `Tensor.type()` still returns CUDA's names, which optimizers and gradient clipping look for.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs and "device" in kwargs:
            kwargs = {**kwargs, "device": replace_cuda(kwargs["device"])}
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # needs a CUDA driver
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | int | torch.device):
            args = (args[0], replace_cuda(args[1]), *args[2:])
        if func is torch.Tensor.type:
            return _tensor_type(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    return tensor.type(dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs)


def replace_cuda(device: Any) -> Any:
    """The CPU for any CUDA device; everything else (None, "meta", ...) unchanged."""
    if isinstance(device, str | torch.device):
        return torch.device("cpu") if torch.device(device).type == "cuda" else device
    return torch.device("cpu") if isinstance(device, int) else device


def gloo_only(function: Callable) -> Callable:
    """Wrap a function of torch.distributed to use Gloo and the CPU for NCCL and CUDA, without NCCL's arguments."""

    def instead(value: Any) -> Any:
        return "cpu" if value == "cuda" else "gloo" if isinstance(value, str) and "nccl" in value else value

    def call(*args: Any, **kwargs: Any) -> Any:
        for name in ("device_id", "device_ids", "pg_options"):
            kwargs.pop(name, None)
        changed = {name: instead(kwargs[name]) for name in ("backend", "device_type") if name in kwargs}
        return function(*map(instead, args), **kwargs | changed)

    return call


def sizes_as_numbers(exchange: Callable) -> Callable:
    """Wrap `all_to_all_single` to take split sizes as tensors: Megatron makes lists of those on a CUDA device only."""

    def as_numbers(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def call(output: Any, input: Any, *others: Any, **named: Any) -> Any:
        named = {name: as_numbers(value) for name, value in named.items()}
        return exchange(output, input, *map(as_numbers, others), **named)

    return call


def with_mode(run_backward: Callable) -> Callable:
    """Wrap torch's call of the autograd engine with `OnCpu`: `torch.autograd.backward` runs with modes off."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return run_backward(*args, **kwargs)

    return run


def _memory(device: Any = None) -> tuple[int, int]:
    """(free, total) bytes of main memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="CPU", major=0, minor=0, total_memory=_memory()[1], multi_processor_count=os.cpu_count(), uuid="cpu"
    )


def surface() -> dict[str, Any]:
    """Dotted name under `torch` -> stand-in, wrapping the current originals."""
    nothing = (
        "init", "synchronize", "empty_cache", "set_device", "set_stream", "ipc_collect", "check_error", "_lazy_init",
        "reset_peak_memory_stats", "reset_max_memory_allocated", "nvtx.range_push", "nvtx.range_pop", "nvtx.mark",
    )  # fmt: skip
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")
    table: dict[str, Any] = {f"cuda.{name}": _answer(None) for name in nothing}
    table |= {f"cuda.{name}": _answer(0) for name in zero}
    table |= {
        "cuda.is_available": _answer(True),
        "cuda.is_initialized": _answer(True),
        "cuda.is_bf16_supported": _answer(True),
        "cuda.is_current_stream_capturing": _answer(False),
        "cuda.device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "cuda.get_device_name": _answer("CPU"),
        "cuda.get_device_capability": _answer((0, 0)),
        "cuda.get_device_properties": _properties,
        "cuda.mem_get_info": _memory,
        "cuda.memory_stats": lambda device=None: defaultdict(int),
        "cuda.Stream": Stream,
        "cuda.Event": Event,
        "cuda.current_stream": lambda device=None: Stream(),
        "cuda.default_stream": lambda device=None: Stream(),
        "cuda.stream": lambda stream: contextlib.nullcontext(),
        "cuda.device": lambda device: contextlib.nullcontext(),
        "cuda._lazy_call": lambda callback, **_: callback(),
        "cuda.default_generators": (torch.default_generator,),
        "Generator": Generator,
        # no compiler; also halves the time of importing Megatron
        "compile": lambda model=None, **_: (lambda function: function) if model is None else model,
        "autograd._engine_run_backward": with_mode(torch.autograd._engine_run_backward),
        "accelerator.current_accelerator": _answer(None),
        "accelerator.is_available": _answer(False),
        "accelerator.device_count": _answer(0),
        "Tensor.cuda": lambda self, *_, **__: self,
        "Tensor.pin_memory": lambda self, *_, **__: self,
        "Tensor.record_stream": _answer(None),
        "distributed.init_process_group": gloo_only(dist.init_process_group),
        "distributed.new_group": gloo_only(dist.new_group),
        "distributed.barrier": gloo_only(dist.barrier),
        "distributed.all_to_all_single": sizes_as_numbers(dist.all_to_all_single),
        "distributed.DeviceMesh.from_group": gloo_only(dist.DeviceMesh.from_group),
    }
    own = torch.default_generator
    generator = {
        "manual_seed": lambda seed: own.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: own.manual_seed(int(seed)),
        "get_rng_state": lambda device=None: own.get_state(),
        "set_rng_state": lambda state, device=None: own.set_state(state),
    }
    table |= {f"cuda.{module}{name}": f for name, f in generator.items() for module in ("", "random.")}
    names = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Bool", "Byte")
    table |= {f"cuda.{n}Tensor": getattr(torch, f"{n}Tensor") for n in names}
    return table
