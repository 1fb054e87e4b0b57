"""Launches of every kernel with the shapes, dtypes, strides and alignments of models, for ``launches``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType
from unittest import mock

import torch
import triton.language as tl
from cp_kernels import backward, convolution, decode, float8, forward, permute, row_term
from cp_kernels import merge as merging
from cp_kernels import payload as payloads
from cp_kernels import rows as row_blocks
from cp_kernels.visible import Runs, View
from launches import empty_cuda
from torch import Tensor

Call = Callable[[], object]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENS = 4096
CONTIGUOUS: Runs = (range(TOKENS),)
ZIGZAG: Runs = (range(TOKENS // 2), range(7 * TOKENS // 2, 4 * TOKENS))
STRIPED: Runs = (range(0, 8 * TOKENS, 8),)


def attention(d: int, e: int, dtype: torch.dtype, queries: Runs = ZIGZAG, keys: Runs = ZIGZAG) -> dict[str, Call]:
    """Forward, forward onto a running partial, backward: 8 query heads in 2 groups."""

    def qkv() -> tuple[Tensor, Tensor, Tensor]:
        heads = ((8, d), (2, d), (2, e))
        q, k, v = (empty_cuda(TOKENS, 1, n, size, dtype=dtype) for n, size in heads)
        return q, k, v

    def sums() -> tuple[Tensor, Tensor]:
        return empty_cuda(TOKENS, 1, 8, e), empty_cuda(TOKENS, 1, 8)

    def gradients() -> object:
        dout, delta = empty_cuda(TOKENS, 1, 8, e, dtype=dtype), empty_cuda(TOKENS, 1, 8)
        return backward.backward(dout, *qkv(), empty_cuda(TOKENS, 1, 8), delta, queries, keys, view, 0.1)

    view = View(right=0)
    return {
        "forward": lambda: forward.forward(*qkv(), queries, keys, view, 0.1),
        "forward onto": lambda: forward.forward(*qkv(), queries, keys, view, 0.1, sums()),
        "backward": gradients,
    }


def unaligned_attention(d: int, dtype: torch.dtype) -> dict[str, Call]:
    """Odd addresses and strides: nothing is a multiple of 16."""

    def cut(heads: int) -> Tensor:
        return empty_cuda(TOKENS, 1, heads, d + 1, dtype=dtype)[..., 1:]

    def continued() -> object:
        sums = empty_cuda(TOKENS, 1, 8, d), empty_cuda(TOKENS, 1, 8)
        return forward.forward(cut(8), cut(2), cut(2), STRIPED, STRIPED, View(), 0.1, sums)

    return {"unaligned forward onto": continued}


def merges(e: int, part: torch.dtype = torch.bfloat16, rows: int = 128) -> dict[str, Call]:
    """Running sums with a partial, in place, of all or some rows; and several partials into new memory."""

    def sums() -> tuple[Tensor, Tensor]:
        return empty_cuda(rows, 1, 8, e), empty_cuda(rows, 1, 8)

    def one(every: int = 1) -> tuple[Tensor, Tensor]:
        return empty_cuda(rows // every, 1, 8, e, dtype=part), empty_cuda(rows // every, 1, 8)

    def some() -> None:
        out, lse = sums()
        merging.merge_into(out[::2], lse[::2], *one(2))

    def chunks() -> object:
        return merging.merge(empty_cuda(4, rows, 1, 8, e, dtype=part).unbind(), empty_cuda(4, rows, 1, 8).unbind())

    return {
        "merge_into": lambda: merging.merge_into(*sums(), *one()),
        "merge_into rows": some,
        "merge": chunks,
        "merge tensors": lambda: merging.merge(*zip(*(one() for _ in range(4)), strict=True), torch.bfloat16),
    }


def copies(d: int, dtype: torch.dtype) -> dict[str, Call]:
    """Row permutation and FP8 payloads."""
    x, order = partial(empty_cuda, 128, 1, 8, d, dtype=dtype), partial(empty_cuda, 128, dtype=torch.int64)
    rows, shapes = (TOKENS, TOKENS // 2, 128), [(1, 8, d), (1, 8, max(1, d // 2))]

    def pack_message() -> object:
        return payloads.pack_message([empty_cuda(sum(rows), *shape, dtype=dtype) for shape in shapes], [rows] * 2, 64)

    def unpack_message() -> object:
        nbytes = payloads._planned((rows,) * 2, tuple(shapes), 64, torch.device("cuda:0")).nbytes
        return payloads.unpack_message(empty_cuda(nbytes, dtype=torch.uint8), shapes, [dtype] * 2, [rows] * 2, 64)

    return {
        "gather_rows": lambda: permute.gather_rows((x(),), order()),
        "gather_rows of heads": lambda: permute.gather_rows((x()[:, :, :2],), order()),
        "scatter_rows": lambda: permute.scatter_rows((x(),), order()),
        "pack_message": pack_message,
        "unpack_message": unpack_message,
    }


def row_terms(e: int, dtype: torch.dtype) -> dict[str, Call]:
    """Delta and the stand-in for out; also for the broadcast gradient of a sum."""
    x = partial(empty_cuda, 128, 1, 8, e, dtype=dtype)
    return {
        "delta": lambda: row_term.delta(x(), x()),
        "delta of a sum": lambda: row_term.delta(empty_cuda(dtype=dtype).expand(128, 1, 8, e), x()),
        "out_from_delta": lambda: row_term.out_from_delta(x(), empty_cuda(128, 1, 8)),
    }


def convolutions(channels: int, dtype: torch.dtype, width: int = 4) -> dict[str, Call]:
    """Of the first channels of a projection: forward, and backward of the halo and of the tokens."""
    weight, table = partial(empty_cuda, channels, width, dtype=dtype), partial(empty_cuda, dtype=torch.int32)

    def rows(n: int, of: int = channels) -> Tensor:
        return empty_cuda(n, 1, of, dtype=dtype)

    def x() -> Tensor:
        return rows(512, 2 * channels)[..., :channels]

    return {
        "convolve": lambda: convolution.convolve(x(), rows(3), table(width, 512), weight(), rows(1)[0, 0]),
        "convolve_back": lambda: convolution.convolve_back(
            rows(512), x(), table(width, 515)[:, :512], weight(), rows(3), table(1, 512)
        ),
        "convolve_back of a halo": lambda: convolution.convolve_back(
            rows(512), rows(3), table(width, 515)[:, 512:], weight()
        ),
    }


def float8s(d: int, dtype: torch.dtype) -> dict[str, Call]:
    """Measuring and rounding to both types, of a slice of packed q, k and v."""

    def x() -> Tensor:
        return empty_cuda(128, 1, 3, 8, d, dtype=dtype)[:, :, 1]

    return {
        "extents": lambda: float8.extents((x(),)),
        "quantize e4m3": lambda: float8.quantize(x(), empty_cuda(), torch.float8_e4m3fn),
        "quantize e5m2": lambda: float8.quantize(x(), empty_cuda(), torch.float8_e5m2),
        "rounded e5m2": lambda: float8.rounded(x(), empty_cuda(), torch.float8_e5m2),
    }


def decodes(d: int, e: int, dtype: torch.dtype) -> dict[str, Call]:
    """A token's attention to a cache of 128k slots: 32 heads, 8 groups; of one group for all where values are part of
    the keys, as in multi-latent attention. In the model's dtype and in one byte an element."""
    groups = 8 if d <= 256 else 1

    def call(packed: bool, tokens: int = 1, batch: int = 2, heads: int = 32) -> object:
        def kept(size: int) -> tuple[Tensor, Tensor | None]:
            rows = empty_cuda(2**17, batch, groups, size, dtype=torch.uint8 if packed else dtype)
            return rows, empty_cuda(2**17, batch, groups, dtype=torch.uint8) if packed else None

        values = kept(e) if groups > 1 else None
        held, positions = empty_cuda(2**17, batch, dtype=torch.int32), empty_cuda(tokens, batch, dtype=torch.int32)
        q = empty_cuda(tokens, batch, heads, d, dtype=dtype)
        return decode.merge_parts(*decode.decode(q, kept(d), values, e, held, positions, 0.1, -1))

    return {
        "decode": lambda: call(False),
        "decode of 16 tokens": lambda: call(False, 16),
        "decode of a packed cache": lambda: call(True),
        "decode of one sequence, heads with keys of their own": lambda: call(False, batch=1, heads=groups),
    }


def with_64_bits(module: ModuleType, call: Call) -> Call:
    """The call with the index type of tensors of 2^31 elements."""

    def made() -> None:
        with mock.patch.object(module, "index_type", lambda largest: tl.int64):
            call()

    return made


def memory_bound(d: int, dtype: torch.dtype) -> dict[str, Call]:
    """All kernels but attention, also with 64-bit offsets; those that store where they read also for two rows."""
    calls = merges(d, dtype) | copies(d, dtype) | row_terms(d, dtype) | float8s(d, dtype) | convolutions(8 * d, dtype)
    long = {"gather_rows": permute} | dict.fromkeys(("pack_message", "unpack_message"), payloads)
    long |= {"convolve": convolution, "convolve_back": convolution}
    calls |= {f"{name} of two": call for name, call in merges(d, dtype, 2).items() if "into" in name}
    in_place = [name for name in calls if "into" in name]
    long |= dict.fromkeys((*in_place, "merge", "delta", "out_from_delta", "extents", "quantize e4m3"), row_blocks)
    return calls | {f"{name}, 64 bits": with_64_bits(module, calls[name]) for name, module in long.items()}


def without_barriers(folder: str) -> Call:
    """``merge_into`` without its barrier: the planted fault."""
    path = f"{folder}/merge_without_barriers.py"
    with open(merging.__file__) as source, open(path, "w") as copy:
        lines = source.read().splitlines(keepends=True)
        kept = [line for line in lines if "tl.debug_barrier()" not in line]
        assert len(kept) < len(lines)
        copy.writelines(kept)
    spec = importlib.util.spec_from_file_location("merge_without_barriers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    return lambda: module.merge_into(*(empty_cuda(*shape) for shape in [(128, 1, 8, 128), (128, 1, 8)] * 2))
