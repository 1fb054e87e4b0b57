"""A CUDA device without hardware: tensors with shapes, dtypes and strides but no data that report ``cuda:0``.

    device = FakeCuda(capability=(9, 0))
    with device:
        q = torch.empty(32, 1, 8, 64, dtype=torch.bfloat16, device="cuda:0")
        out = cp.attention(q, k, v)             # takes all CUDA branches; autograd works
    device.ops.waits                            # places where the host would wait for the GPU
    device.ops.launches                         # what would run on it

They are torch's ``meta`` tensors with another device towards Python. (With a ``FakeTensor`` on ``cuda:0``, autograd's
engine asks a driver about its device.) CPU tensors are real. Both may be combined only where torch allows it: copies,
indices, and zero-dimensional CPU tensors.

Every thread has a current device, 0 at first, on which its calls open a context (``contexts``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from equipment.cuda.ops import Ops, all_tensors, cuda_tensors, place
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda:0")
_META = torch.device("meta")
Start = Callable[..., "FakeCuda"]
"""Starts a device; takes its capability and libraries, as for ``libraries.install``."""


class MixedDevicesError(RuntimeError):
    """An operation combines a CPU tensor with one on the device."""


class FakeCuda:
    """A context in which this process has one GPU that computes nothing; others exist for threads to be on."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.ops = Ops()
        self.contexts: set[int] = set()
        """Devices on which this process has opened a context."""
        self._thread = threading.local()
        self._stack = ExitStack()

    def current_device(self) -> int:
        """Of the calling thread."""
        return getattr(self._thread, "device", 0)

    def set_device(self, device: torch.device | int) -> None:
        self._thread.device = device if isinstance(device, int) else device.index
        self.touch()

    def touch(self) -> None:
        """Open a context on the calling thread's current device if there is none."""
        self.contexts.add(self.current_device())

    def __enter__(self) -> FakeCuda:
        stream = SimpleNamespace(synchronize=lambda: self.ops.wait("Stream.synchronize"), wait_event=lambda event: None)
        stubs: dict[str, Any] = {
            "get_device_capability": lambda device=None: self.capability,
            "current_device": self.current_device,
            "set_device": self.set_device,
            "is_initialized": lambda: True,
            "current_stream": lambda device=None: stream,
            "device": lambda device: nullcontext(),
            "synchronize": lambda device=None: self.ops.wait("torch.cuda.synchronize"),
            "Event": lambda **named: _Event(self),
            "_lazy_init": lambda: None,
        }
        self._stack.enter_context(mock.patch.multiple(torch.cuda, **stubs))
        self._stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda x, stream: None))
        # otherwise Python functions of an autograd graph would run without ``_Above``
        self._stack.enter_context(mock.patch.object(torch.autograd, "has_torch_function", lambda tensors: False))
        self._stack.enter_context(_Below(self))
        self._stack.enter_context(_Above(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def seen(self) -> Iterator[None]:
        """In the block the device is there for this thread, too, which did not start it."""
        with _Below(self), _Above(self):
            yield

    @contextmanager
    def library(self, name: str, *read: Any) -> Iterator[list[Any]]:
        """A context that counts as one call of a library's kernel; the list is for its results."""
        made: list[Any] = []
        with self.ops.unseen():
            yield made
        self.ops.launch(name, read, tuple(made))

    def pin(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            copy = x.clone()
            copy.is_in_pinned_memory = True  # type: ignore[attr-defined]
        return copy


def once_warm[T](device: FakeCuda, call: Callable[[], T]) -> T:
    """The result of a second call, during which the host must not wait."""
    call()
    device.ops.clear()
    result = call()
    assert device.ops.launches, "nothing ran on the device"
    assert not device.ops.waits, "the host waits for the device:\n" + "\n".join(map(str, device.ops.waits))
    return result


class _Event:
    def __init__(self, device: FakeCuda) -> None:
        self._device = device

    def record(self, stream: Any = None) -> None:
        self._device.touch()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        self._device.ops.wait("Event.synchronize")


class _Above(TorchFunctionMode):
    """Between Python and torch: device names, and functions that copy lists and numbers to the device."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _TOLD:
            real = func(*args)
            return _TOLD[func] if args[0].is_meta else real
        if func is Tensor.backward:
            with self:
                return torch.autograd.backward(args, *named.values())
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            return self._device.pin(args[0])
        if name == "untyped_storage" and args[0].is_meta:
            return _storage(func(*args))
        if (
            name in ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")
            and args[0].is_meta
        ):
            return self._to_host(name, args[0])
        args, named = _renamed(args), {key: _renamed(value, key == "device") for key, value in named.items()}
        if name == "to" and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], _renamed(args[1], True), *args[2:])
        if name in ("__getitem__", "__setitem__") and args[0].is_meta and _has_list(args[1]):
            self._device.ops.wait("indices in a list for a tensor on the device")
        if name in ("tensor", "as_tensor", "new_tensor"):
            return self._from_data(name, func, args, named)
        return func(*args, **named)

    def _to_host(self, name: str, x: Tensor) -> Any:
        """Return zeros, so that the run continues to the next wait."""
        self._device.ops.wait(f"Tensor.{name.strip('_')}")
        zeros = torch.zeros(x.shape, dtype=x.dtype)
        return getattr(zeros, name)()

    def _from_data(self, name: str, func: Callable[..., Any], args: Any, named: Any) -> Tensor:
        data = args[1] if name == "new_tensor" else args[0] if args else named.get("data")
        to = named.get("device", args[0].device if name == "new_tensor" else None)
        if not isinstance(data, Tensor) and to == _META:
            self._device.ops.wait(f"torch.{name} of a list or number, to the device")
        return func(*args, **named)


def _storage(storage: torch.UntypedStorage) -> SimpleNamespace:
    """With an address of its own, which memory without data has not."""
    return SimpleNamespace(_cdata=storage._cdata, data_ptr=lambda: storage._cdata, nbytes=storage.nbytes)


_TOLD: dict[Any, Any] = {
    Tensor.device.__get__: CUDA,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}


def _has_list(index: Any) -> bool:
    return any(isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,)))


def _renamed(argument: Any, text: bool = False) -> Any:
    """Replace ``cuda`` by the meta device; text: also in a string."""
    if isinstance(argument, torch.device):
        return _META if argument.type == "cuda" else argument
    if isinstance(argument, tuple | list) and not isinstance(argument, torch.Size):
        return type(argument)(map(_renamed, argument)) if type(argument) in (tuple, list) else argument
    return _META if text and isinstance(argument, str) and argument.startswith("cuda") else argument


class _Below(TorchDispatchMode):
    """Between torch and its kernels: every operation."""

    def __init__(self, device: FakeCuda) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, named: Any) -> Any:
        name, ops = func.overloadpacket.__name__, self._device.ops
        device = _renamed(named.get("device"), True)
        if device is not None:
            named = {**named, "device": device}
        if not cuda_tensors((args, named)) and device != _META:
            return func(*args, **named)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, named)
        if name in _STAND_INS:
            ops.wait(f"aten.{name}")
            return _STAND_INS[name](*args)
        if name == "repeat_interleave" and named.get("output_size") is None:
            ops.wait("aten.repeat_interleave of a tensor, without output_size")
            return args[0].new_empty(0)
        if name == "isin" and args[1].numel() >= 10 * args[0].numel() ** 0.145:  # torch's threshold
            ops.wait("aten.isin of so many, which are sorted")
        if name == "where" and not all(x.is_meta for x in args):
            ops.wait("aten.where of a CPU tensor, a blocking copy to the device")
        if name in ("index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_"):
            args = (args[0], [self._index(i) for i in args[1]], *args[2:])
        self._refuse_mixture(name, args, named)
        result = func(*args, **named)
        ops.torch(func, args, named, result)
        return result

    def _copy(self, func: Any, name: str, args: Any, named: Any) -> Any:
        onto = name == "copy_"
        source = args[1 if onto else 0]
        there = args[0].is_meta if onto else named.get("device", source.device).type == "meta"
        ops = self._device.ops
        if source.is_meta and not there:
            ops.wait("a copy to the host")
            return args[0].zero_() if onto else torch.zeros(source.shape, dtype=named.get("dtype") or source.dtype)
        if source.is_meta:
            result = func(*args, **named)
            if not onto or not _same_memory(args[0], source):
                ops.torch(func, args, named, result)
            return result
        if not getattr(source, "is_in_pinned_memory", False):
            ops.wait("a copy to the device from memory that is not pinned")
        elif not named.get("non_blocking", args[2] if len(args) > 2 else False):
            ops.wait("a blocking copy to the device")
        result = args[0] if onto else func(*args, **named)
        ops.launch(name, (), (result,))
        return result

    def _index(self, index: Tensor | None) -> Tensor | None:
        if index is None:
            return None
        if index.dtype in (torch.bool, torch.uint8):
            self._device.ops.wait("an index by a mask")
            return torch.empty(index.numel(), dtype=torch.int64, device=_META)
        if not index.is_meta:
            self._device.ops.wait("indices on the CPU for a tensor on the device")
            return index.to(_META)
        return index

    def _refuse_mixture(self, name: str, args: Any, named: Any) -> None:
        for x in all_tensors((args, named)):
            if not x.is_meta and x.dim() > 0:
                raise MixedDevicesError(f"aten.{name} at {place()}: a CPU tensor {tuple(x.shape)} beside one on {CUDA}")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a copy is a no-op, as that of ``x[rows] += y`` back into x."""
    first, second = ((x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (a, b))
    return first == second and a.untyped_storage()._cdata == b.untyped_storage()._cdata


_STAND_INS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": lambda x: torch.zeros((), dtype=x.dtype).item(),
    "is_nonzero": lambda x: False,
    "equal": lambda a, b: a.shape == b.shape,
    "nonzero": lambda x: torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=_META),
    "masked_select": lambda x, mask: x.new_empty(x.numel()),
    "bincount": lambda x, *_: torch.empty(x.numel(), dtype=torch.int64, device=_META),
    "_unique2": lambda x, *_: (torch.empty_like(x.flatten()), *(torch.empty(0, dtype=torch.int64, device=_META),) * 2),
}
"""Operations that make the host wait -> their result here, of any shape, since the call is wrong anyway."""
