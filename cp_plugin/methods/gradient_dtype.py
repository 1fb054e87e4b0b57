"""``--cp-gradient-dtype``: the dtype in which gradient sums (dq, or dk and dv) travel between ranks.

    float32   as they are accumulated (float64 for float64 models)
    model     rounded to the model's dtype before they travel (``cp_plugin.comm.narrow``): half the bytes

Ranks accumulate in float32 either way. Methods need not know: they hand sums to ``reduce_scatter``, or to messages of
the group ``sums(axis)``, and count ``Problem.sum_bytes`` for an element.
"""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.comm.narrow import NarrowSums
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods.protocol import Provider, with_option

GRADIENT_DTYPE = Option(
    "gradient_dtype",
    metavar="DTYPE",
    meaning="dtype in which gradient sums (dq, or dk and dv) travel between ranks; model: the model's, half the bytes; "
    "ranks accumulate in float32 either way",
    default="exact",
    choices=("model",),
    unset="float32",
)


def with_gradient_dtype(inner: Provider) -> Provider:
    """The provider with the option."""
    return with_option(
        inner,
        GRADIENT_DTYPE,
        as_sent=lambda problem, options: replace(problem, narrow_sums=options.gradient_dtype == "model"),
        over=lambda mesh, problem: NarrowSums(mesh, problem.dtype) if problem.narrow_sums else mesh,
        refused=_refused,
    )


def _refused(problem: Problem, options: Options) -> str | None:
    if options.gradient_dtype != "model" or problem.dtype.itemsize == 2:
        return None
    name = dtype_name(problem.dtype)
    return (
        f"--cp-gradient-dtype model: sums of a {name} model are {name} either way; use --bf16 or --fp16, or leave it "
        "out"
    )
