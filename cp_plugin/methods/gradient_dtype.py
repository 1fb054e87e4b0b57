"""What ``--cp-gradient-dtype`` does to a provider that sums gradients over ranks: dq, or dk and dv.

    float32   sums travel as they are kept (float64 for float64 models)
    model     and are rounded to the model's dtype before they travel (``cp_plugin.comm.narrow``): half of the bytes

On a rank sums are in float32 either way. A method needs to know nothing of it: it hands its sums to ``reduce_scatter``,
or to messages of the group ``sums(axis)``, and its formula counts ``Problem.sum_bytes`` for an element of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cp_plugin.comm import Mesh
from cp_plugin.comm.narrow import NarrowSums
from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods.protocol import Choice, Formula, Provider

GRADIENT_DTYPE = Option(
    "gradient_dtype",
    metavar="DTYPE",
    meaning="in what dtype sums of gradients (dq, or dk and dv) travel between ranks; model: that of the model, half "
    "of the bytes; on a rank they are in float32 either way",
    default="exact",
    choices=("model",),
    unset="float32",
)


def with_gradient_dtype(inner: Provider) -> Provider:
    """The provider with the option."""

    def build(mesh: Mesh, local: Any, problem: Problem, options: Options) -> Any:
        problem = _as_sent(problem, options)
        return inner.build(NarrowSums(mesh, problem.dtype) if problem.narrow_sums else mesh, local, problem, options)

    def traffic(problem: Problem, options: Options, index: int) -> Formula:
        return inner.traffic(_as_sent(problem, options), options, index)

    def choose(problem: Problem, options: Options) -> Choice:
        return inner.choose(_as_sent(problem, options), options)

    def unsupported(problem: Problem, options: Options) -> str | None:
        if options.gradient_dtype == "model" and problem.dtype.itemsize != 2:
            name = str(problem.dtype).removeprefix("torch.")
            return (
                f"--cp-gradient-dtype model: sums of a {name} model are {name} either way; use --bf16 or --fp16, or "
                "leave it out"
            )
        return inner.unsupported(_as_sent(problem, options), options)

    return replace(
        inner,
        options=(*inner.options, GRADIENT_DTYPE),
        build=build,
        traffic=traffic,
        choose=choose,
        unsupported=unsupported,
    )


def _as_sent(problem: Problem, options: Options) -> Problem:
    return replace(problem, narrow_sums=options.gradient_dtype == "model")
