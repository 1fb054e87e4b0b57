"""Every provider on rank threads: with every kernel that runs here, against attention in float64; and in inference."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from cases import attend, cannot, lacking, masked, parts_of, possible, provider
from record import Row, Step, Verdict, judge, worst
from torch import Tensor
from workers import check_each

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.calls import Inputs, Setup, settled_or_reason
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry
from cp_plugin.testing import oracle, verify, verify_decode

IN_FP8 = ("float8", "te_fp8")
DECODED = Problem(
    size=4, batch=2, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, seq_length=256, dtype=torch.bfloat16
)
TINY_DECODED = replace(DECODED, size=2, heads=2, kv_heads=1, head_dim=16, v_head_dim=16, seq_length=16)


def providers(step: Step) -> None:
    for backend, reason in possible(step.device).items():
        if reason:
            step.not_run(f"providers with backend {backend}", reason)
    groups = defaultdict(list)
    for case in cases(step.device, smoke=step.smoke):
        groups[case.group, heads(case.problem)].append(case)
    check_each(step, run, list(groups.values()), describe_rest)


def describe_rest(group: list[Case]) -> tuple[str, str]:
    return group[0].group, f"{len(group)} cases of {heads(group[0].problem)}"


def run(group: list[Case]) -> Iterator[Row]:
    """Cases of one kernel and one shape."""
    for case in group:
        ok, detail = judge(partial(compare_case, case))
        yield case.group, str(case), ok, {"of": parts_of(case.setup)} | detail


def compare_case(case: Case) -> Verdict:
    setup, device = case.setup, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := cannot(setup, device):
        return None, {"reason": reason}
    return worst(*errors(setup, case.documents, device))


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
        return settled_or_reason(registry.get(self.provider), self.problem, self.options)

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


def cases(device: torch.device, *, smoke: bool) -> list[Case]:
    """All cases of the backends that run here, the most important first."""
    if smoke:
        tiny = Problem(size=2, seq_length=32, heads=2, head_dim=16, dtype=torch.float32)
        half = replace(tiny, dtype=torch.bfloat16, kv_heads=2, seq_length=64)
        both = ("causal", "documents and window")
        smallest = [
            *_all(tiny, Options(backend="sdpa"), both[:1]),
            *_all(tiny, Options(backend="sdpa"), both[1:], others=True)[:4],
            *_all(tiny, Options(backend="triton"), both, names=("ring", "attention2d")),
            *_all(half, Options(backend="float8", fp8="compute"), both[:1], names=("ring",)),
            *_all(half, Options(fp8="comm"), both[:1], names=("all_gather",)),
        ]
        return [case for case in smallest if not lacking(case.options.backend, device, case.problem)]
    mha = Problem(size=4, seq_length=1024, heads=16, kv_heads=16)
    gqa, mla = replace(mha, kv_heads=4), replace(mha, head_dim=192)
    chosen: list[Case] = []
    for backend in (name for name, reason in possible(device).items() if not reason):
        options = Options(backend=backend, fp8="compute" if backend in IN_FP8 else None)
        for problem in (gqa, mha):
            chosen += _all(problem, options, ("causal", "full", "window", "documents"))
        chosen += _all(gqa, options, ("causal", "documents"), others=True)
        if backend in ("auto", "triton"):
            chosen += _all(replace(gqa, dtype=torch.float16), options, ("causal", "documents and window"))
        if not lacking(backend, device, mla):
            chosen += _all(mla, options, ("causal", "documents"))
    return chosen + _all(gqa, Options(fp8="comm"), ("causal", "documents"))


def _all(
    problem: Problem, options: Options, masks: Sequence[str], *, others: bool = False, names: Sequence[str] = ()
) -> list[Case]:
    """Providers (all by default) on their default layout, or on the ``others`` that balance the work."""
    cases = []
    for name in names or registry.names():
        first, *rest = registry.get(name).layouts
        for layout in [x for x in rest if x in ("zigzag", "striped")] if others else [first]:
            cases += [Case(name, replace(options, layout=layout), *masked(problem, mask), mask) for mask in masks]
    return cases


def errors(setup: Setup, documents: tuple[int, ...], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error (norm) of out, dq, dk and dv on rank threads against float64, and the limits of ``verify``."""
    right = _answer(replace(setup.problem, size=1, bounds=documents), device)

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(setup, mesh=mesh)
        shards = right.inputs.sharded(cp, device)
        return tuple(cp.unshard(x) for x in attend(cp, shards, setup.problem, documents))

    got = run_threads(rank, setup.axes, patience=100)[0]
    return oracle.relative_errors(got, right.want, oracle.tensors(right.problem)), verify.limits(setup, right, device)


@lru_cache(maxsize=32)
def _answer(problem: Problem, device: torch.device) -> oracle.Case:
    """``oracle.make_case`` computed on the device: a CPU takes seconds."""
    inputs = oracle.make_inputs(problem)
    want = oracle.answer(Inputs(*(x.to(device) for x in inputs[:4])), problem)
    return oracle.Case(inputs, tuple(x.cpu() for x in want), problem)


def inference(step: Step) -> None:
    """Prefill and decode, compared as ``cp-plugin verify --decode`` does."""
    problems = [TINY_DECODED if step.smoke else DECODED]
    in_fp8 = [setup for setup in verify_decode.plan([], problems, Options(fp8="comm")) if setup.options.fp8]
    for setup in verify_decode.plan([], problems, Options()) + in_fp8:
        decay = f", a decay of each {setup.problem.decay}" if setup.provider.kind == "linear" else ""
        fp8 = ", --cp-fp8 comm" if setup.options.fp8 else ""
        name = f"{setup.provider.name} on {setup.layout}{decay}{fp8}"
        if reason := cannot(setup, step.device):
            step.not_run(f"inference: {name}", reason)
        else:
            of, call = (provider(setup.provider.name), "kernel decode"), partial(compare_decoding, setup, step.device)
            step.attempt("prefill and decode, ranks as threads", name, call, of)


def compare_decoding(setup: Setup, device: torch.device) -> Verdict:
    """Compare the four outputs of a setup."""
    with patch.object(verify, "refuse_too_large", lambda *_, **__: 60.0):  # it is small, and psutil may be missing
        (result,) = verify.verify([setup], device.type, threads=True, check=verify_decode.GENERATION)
    return (False, {"failure": result.failure}) if result.failure else worst(result.errors, result.limits)
