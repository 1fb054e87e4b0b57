"""Calls of providers: which are checked, and how they run on rank threads or as one rank without peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.calls import Inputs, Setup, settled_or_reason
from cp_plugin.engine.comm import Mesh, TraceMesh, run_threads
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import CallInfo, Problem
from cp_plugin.engine.core.values import Gradients, KeyValues, Partial, Queries
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.moves import no_gradients, nothing_seen
from cp_plugin.engine.methods.protocol import Attend
from cp_plugin.testing import oracle, verify

IN_FP8 = ("float8", "te_fp8")
ONLY_A_REFERENCE = "the reference for the others: plain torch, one score matrix after another"
USUAL = Problem(size=1)


class Case(NamedTuple):
    """One call of one provider, forward and backward; picklable."""

    provider: str
    options: Options
    problem: Problem
    documents: tuple[int, ...]
    mask: str
    """As in ``masked``."""

    @property
    def setup(self) -> Setup:
        return settled_or_reason(providers.get(self.provider), self.problem, self.options)

    @property
    def group(self) -> str:
        fp8 = self.options.fp8
        return f"backend {self.options.backend}" + (f", --cp-fp8 {fp8}" if fp8 else "")

    def __str__(self) -> str:
        return f"{self.provider} on {self.options.layout}, {self.mask}, {heads(self.problem)}"


def heads(problem: Problem) -> str:
    """``heads 16:4 of 192/128, bfloat16``."""
    d, e = problem.head_dim, problem.v_head_dim
    sizes = f"{d}" if d == e else f"{d}/{e}"
    return f"heads {problem.heads}:{problem.kv_heads} of {sizes}, {str(problem.dtype).removeprefix('torch.')}"


def kernel(name: str, d: int, e: int) -> str:
    """What the check calls a kernel of attention for these head sizes in ``of``."""
    return f"kernel {name} for heads of {d}/{e}"


def provider(name: str) -> str:
    """What the check calls a provider in ``of``."""
    return f"provider {name}"


def of_setup(setup: Setup) -> tuple[str, ...]:
    """The provider and the kernel of a setup, for ``of``."""
    problem = setup.problem
    return provider(setup.provider.name), kernel(setup.options.backend, problem.head_dim, problem.v_head_dim)


def of_timed(setup: Setup, device: torch.device) -> tuple[str, ...]:
    """The same, with all kernels that ``auto`` may use."""
    problem = setup.problem
    backends_ = blocks.choose(setup.options, problem, device).backends
    return *of_setup(setup), *(kernel(name, problem.head_dim, problem.v_head_dim) for name in backends_)


def masked(problem: Problem, mask: str) -> tuple[Problem, tuple[int, ...]]:
    """The call with a mask, and its document bounds: ``causal``, ``full``, ``window``, ``documents``, or the last two
    joined by ``and``. Windows and documents end at arbitrary positions."""
    s = problem.seq_length
    bounds = (0, s // 9, s // 9 + 1, s // 2 + 3, s) if "documents" in mask else ()
    window = (s // 7, 0) if "window" in mask else None
    return replace(problem, causal=mask != "full", window=window, documents=bool(bounds)), bounds


def lacking(backend: str, device: torch.device, problem: Problem = USUAL) -> str:
    """Why a backend cannot compute such heads here, or ""."""
    if backend == "auto":
        return ""
    if backend == "reference":
        return ONLY_A_REFERENCE
    return backends.get(backend).unsupported(CallInfo.from_problem(problem, device)) or ""


def cannot(setup: Setup, device: torch.device) -> str:
    """Why a setup cannot run on a device, or "": the provider's reason, or that of the kernel it would use."""
    if setup.reason is not None:
        return setup.reason
    try:
        verify.check_kernel(setup, device)
    except ValueError as error:
        return str(error)
    return ""


def possible(device: torch.device) -> dict[str, str]:
    """Backend -> "" if it runs here, or the reason why not."""
    return {name: lacking(name, device) for name in backends.names()}


def cases(device: torch.device, *, smoke: bool) -> list[Case]:
    """All cases of the backends that run here, the most important first."""
    if smoke:
        tiny = Problem(size=2, seq_length=32, heads=2, head_dim=16, dtype=torch.float32)
        half = replace(tiny, dtype=torch.bfloat16, kv_heads=2, seq_length=64)
        both = ("causal", "documents and window")
        found = [
            *_all(tiny, Options(backend="sdpa"), both[:1]),
            *_all(tiny, Options(backend="sdpa"), both[1:], others=True)[:4],
            *_all(tiny, Options(backend="triton"), both, names=("ring", "attention2d")),
            *_all(half, Options(backend="float8", fp8="compute"), both[:1], names=("ring",)),
            *_all(half, Options(fp8="comm"), both[:1], names=("all_gather",)),
        ]
        return [case for case in found if not lacking(case.options.backend, device, case.problem)]
    mha = Problem(size=4, seq_length=1024, heads=16, kv_heads=16)
    gqa, mla = replace(mha, kv_heads=4), replace(mha, head_dim=192)
    found: list[Case] = []
    for backend in (name for name, reason in possible(device).items() if not reason):
        options = Options(backend=backend, fp8="compute" if backend in IN_FP8 else None)
        for problem in (gqa, mha):
            found += _all(problem, options, ("causal", "full", "window", "documents"))
        found += _all(gqa, options, ("causal", "documents"), others=True)
        if backend in ("auto", "triton"):
            found += _all(replace(gqa, dtype=torch.float16), options, ("causal", "documents and window"))
        if not lacking(backend, device, mla):
            found += _all(mla, options, ("causal", "documents"))
    return found + _all(gqa, Options(fp8="comm"), ("causal", "documents"))


def _all(
    problem: Problem, options: Options, masks: Sequence[str], *, others: bool = False, names: Sequence[str] = ()
) -> list[Case]:
    """Providers (all by default) on their default layout, or on the ``others`` that balance the work."""
    found = []
    for name in names or providers.names():
        first, *rest = providers.get(name).layouts
        for layout in [x for x in rest if x in ("zigzag", "striped")] if others else [first]:
            found += [Case(name, replace(options, layout=layout), *masked(problem, mask), mask) for mask in masks]
    return found


def errors(setup: Setup, documents: tuple[int, ...], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error (norm) of out, dq, dk and dv on rank threads against float64, and the limits of ``verify``."""
    right = _answer(replace(setup.problem, size=1, bounds=documents), device)

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(setup, mesh=mesh)
        shards = right.inputs.sharded(cp, device)
        return tuple(cp.unshard(x) for x in attend(cp, shards, setup.problem, documents))

    got = run_threads(rank, setup.axes, patience=100)[0]
    return oracle.relative_errors(got, right.want, oracle.tensors(right.problem)), verify.limits(setup, right, device)


def attend(cp: ContextParallel, x: Inputs, problem: Problem, documents: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of this rank's tokens, without autograd."""
    method = cp.method(problem, x.q.device, Scores(x.q.size(3) ** -0.5), problem.mask(documents))
    return Alone(method, Inputs(*(y.detach() for y in x[:4])))()


@lru_cache(maxsize=32)
def _answer(problem: Problem, device: torch.device) -> oracle.Case:
    """``oracle.make_case`` computed on the device: a CPU takes seconds."""
    inputs = oracle.make_inputs(problem)
    want = oracle.answer(Inputs(*(x.to(device) for x in inputs[:4])), problem)
    return oracle.Case(inputs, tuple(x.cpu() for x in want), problem)


class Alone(NamedTuple):
    """A method on one rank's shards; of ``rank_of``, whose peers send zeros, with real kernels."""

    method: Attend
    x: Inputs

    def forward(self) -> Partial:
        queries, kv = Queries(self.x.q), KeyValues(self.x.k, self.x.v)
        return self.method.forward(queries, kv) or nothing_seen(queries, kv)

    def backward(self, lse: Tensor, delta: Tensor) -> Gradients:
        q, k, v, dout, *_ = self.x
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return self.method.backward(queries, kv) or no_gradients(queries, kv)

    def __call__(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        out, lse = self.forward()
        dtype, wide = self.x.q.dtype, lse.dtype
        delta = (self.x.dout.to(wide) * out.to(dtype).to(wide)).sum(-1)
        return tuple(y.to(dtype) for y in (out, *self.backward(lse, delta)))


def rank_of(setup: Setup, device: torch.device, documents: tuple[int, ...] = (), index: int = 1) -> Alone:
    """One rank of a provider on random shards."""
    problem = setup.problem
    cp = ContextParallel(setup, mesh=TraceMesh(setup.axes, index))
    method = cp.method(problem, device, Scores(problem.head_dim**-0.5), problem.mask(documents))
    empty = calls.shapes(problem, problem.seq_length // problem.size)[:4]
    return Alone(method, Inputs(*(torch.randn(y.shape, device=device).to(y.dtype) for y in empty)))
