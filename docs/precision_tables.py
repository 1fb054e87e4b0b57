"""How far gradients are from exact ones, by the dtype in which their sums travel: the table of the page on precision.

    python docs/precision_tables.py            print it: minutes, since all of it is computed on ranks that are threads
    python docs/precision_tables.py --ranks 8  that of fewer ranks

Nothing that the plugin does is emulated. Two things are, in torch on the CPU, since they need GPUs: Transformer
Engine's ring (``transformer_engine_ring``) and sums by NCCL (``AsNccl``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import markdown_tables as markdown
import torch
from torch import Tensor

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention import calls
from cp_plugin.comm import Mesh, Pending, run_threads
from cp_plugin.comm.mesh import Tensors
from cp_plugin.comm.over import Over
from cp_plugin.core.dtypes import accumulation_dtype, dtype_name
from cp_plugin.core.mask import CAUSAL
from cp_plugin.core.options import Options
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels import blocks
from cp_plugin.methods import registry as providers
from cp_plugin.methods.ring import Ring
from cp_plugin.testing.oracle import Case, make_case, relative_errors

GRADIENTS = ("dq", "dk", "dv")
RANKS = (8, 64)
DTYPES = (torch.bfloat16, torch.float16)
Errors = dict[str, float]
"""Tensor -> relative error (norm) against float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    sums: str
    """How sums travel and are taken."""
    errors: Callable[[int, torch.dtype], Errors]


class AsNccl(Over):
    """A mesh whose reduce-scatter sums as NCCL's ring does: from rank to rank, in the dtype that travels."""

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        n, here = self.axes[axis], self.coordinates[axis]

        def around(t: Tensor) -> Tensor:
            parts = t.chunk(n)
            total = parts[(here + 1) % n].clone()
            for step in range(2, n + 1):
                total += parts[(here + step) % n]
            return total

        return self._mesh._all_to_all(axis, tensors).then(around)


def problem_of(ranks: int, dtype: torch.dtype) -> Problem:
    """Causal, grouped heads, as many tokens whatever the ranks."""
    return Problem(size=ranks, heads=4, kv_heads=2, head_dim=64, seq_length=1024, dtype=dtype)


def one_device(ranks: int, dtype: torch.dtype) -> Errors:
    """Of one call of the kernel."""
    problem = problem_of(1, dtype)
    kernel = blocks.choose(Options(), problem, torch.device("cpu")).kernel
    case = _case(dtype)
    return _gradients(relative_errors(calls.of_kernel(kernel, case.inputs[:4], CAUSAL), case.want))


def of_provider(
    ranks: int, dtype: torch.dtype, name: str, *, over: Callable[[Mesh], Mesh] = lambda mesh: mesh, **options: Any
) -> Errors:
    """Of a provider."""
    problem, case = problem_of(ranks, dtype), _case(dtype)
    axes = providers.get(name).axes(ranks, Options(**options))

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(name, mesh=over(mesh), problem=problem, **options)
        got = calls.directly(cp, case.inputs.sharded(cp, torch.device("cpu")), problem)
        return tuple(cp.unshard(x) for x in got)

    return _gradients(relative_errors(run_threads(rank, axes, patience=600)[0], case.want))


def transformer_engine_ring(ranks: int, dtype: torch.dtype) -> Errors:
    """Of the arithmetic of its ``AttnFuncWithCPAndKVP2P`` (2.20, causal, without FP8), emulated.

    The blocks' gradients come from a kernel in the model's dtype. dq is summed in that dtype on its rank, in the order
    in which keys arrive: those of the rank above first, its own last. dk and dv travel in it and are added in it at
    each hop. The forward is ours.
    """
    problem, case = problem_of(ranks, dtype), _case(dtype)

    def rank(mesh: Mesh) -> tuple[ContextParallel, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        cp = ContextParallel("ring", mesh=mesh, problem=problem, layout="zigzag")
        q, k, v, dout, _ = case.inputs.sharded(cp, torch.device("cpu"))
        assert q is not None and k is not None and v is not None and dout is not None
        q, k, v, dout = (x.detach() for x in (q, k, v, dout))
        method = cp.method(problem, q.device, q.size(3) ** -0.5)
        assert isinstance(method, Ring)
        done = method.forward(Queries(q), KeyValues(k, v))
        assert done is not None
        out = done.out.to(dtype)
        delta = (dout.to(accumulation_dtype(dtype)) * out.to(accumulation_dtype(dtype))).sum(-1)
        dq, sent = torch.zeros_like(q), []
        for step in range(ranks):
            source = (cp.index + step + 1) % ranks
            k_i, v_i = (cp.layout.shard(x, 0, ranks, cp.numbers[source]) for x in case.inputs[1:3])
            queries = Queries(q, dout, done.lse, delta)
            grads = method.inner.backward(queries, KeyValues(k_i, v_i, owners=lambda _, of=source: (of,)))
            assert grads is not None
            dq += grads.dq.to(dtype)
            sent.append((grads.dk.to(dtype), grads.dv.to(dtype)))
        return cp, out, dq, sent

    done = run_threads(rank, {"cp": ranks}, patience=600)
    sums: list[list[Tensor]] = []
    for owner in range(ranks):
        totals = [torch.zeros_like(x) for x in done[owner][3][0]]
        for step in range(ranks):
            adding = (owner - 1 - step) % ranks
            for total, part in zip(totals, done[adding][3][step], strict=True):
                total += part
        sums.append(totals)
    shards = [(out, dq, *sums[index]) for index, (_, out, dq, _) in enumerate(done)]
    layout = done[0][0].layout
    return _gradients(relative_errors([layout.unshard(list(x), 0) for x in zip(*shards, strict=True)], case.want))


def rows() -> Iterator[Row]:
    """One device, upstream, and each way in which a provider sums."""
    yield Row(name="one device", sums="none", errors=one_device)
    yield Row(name="Transformer Engine's ring", sums="model (emulated)", errors=transformer_engine_ring)
    ways: dict[str, dict[str, Any]] = {
        "`ring`, zigzag": {"name": "ring", "layout": "zigzag"},
        "`burst`, zigzag, queries travel": {"name": "burst", "layout": "zigzag", "backward": "q", "intra_size": 1},
        "`all_gather`": {"name": "all_gather", "head_groups": 1},
        "`attention2d`": {"name": "attention2d", "head_groups": 1},
    }
    for name, asked in ways.items():
        yield Row(name=name, sums="float32", errors=_provider(**asked))
        yield Row(name=name, sums="model", errors=_provider(**asked, gradient_dtype="model"))
        if asked["name"] in ("all_gather", "attention2d"):
            summed = _provider(**asked, gradient_dtype="model", over=AsNccl)
            yield Row(name=name, sums="model, by NCCL (emulated)", errors=summed)


def table(ranks: tuple[int, ...] = RANKS) -> str:
    """Percent."""
    head = ["gradients of", "sums", *(f"{dtype_name(dtype)}, {n} ranks: dq, dk, dv" for dtype in DTYPES for n in ranks)]
    lines = []
    for row in rows():
        found = [row.errors(n, dtype) for dtype in DTYPES for n in ranks]
        cells = [", ".join(f"{100 * errors[name]:.2g} %" for name in GRADIENTS) for errors in found]
        lines.append((row.name, row.sums, *cells))
    return markdown.table(head, lines)


def _provider(**asked: Any) -> Callable[[int, torch.dtype], Errors]:
    def errors(ranks: int, dtype: torch.dtype) -> Errors:
        return of_provider(ranks, dtype, **asked | ({"grid": grid(ranks)} if asked["name"] == "attention2d" else {}))

    return errors


def grid(ranks: int) -> tuple[int, int]:
    """Rows and columns of ATTENTION2D: as square as it can be, with more rows."""
    columns = max(n for n in range(1, ranks + 1) if n * n <= ranks and ranks % n == 0)
    return ranks // columns, columns


@cache
def _case(dtype: torch.dtype) -> Case:
    return make_case(problem_of(1, dtype))


def _gradients(errors: Errors) -> Errors:
    return {name: errors[name] for name in GRADIENTS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the table of the page on precision.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    torch.set_num_threads(1)
    print(table(tuple(parser.parse_args().ranks)))
