"""What ``--cp-gradient-dtype`` does to a provider that sums gradients over ranks: dq, or dk and dv.

    float32   sums travel as they are kept (float64 for float64 models)
    model     and are rounded to the model's dtype before they travel (``cp_plugin.comm.narrow``): half of the bytes

On a rank sums are in float32 either way. A method needs to know nothing of it: it hands its sums to ``reduce_scatter``,
or to messages of the group ``sums(axis)``, and its formula counts ``Problem.sum_bytes`` for an element of them.
"""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.comm.narrow import NarrowSums
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods.protocol import Provider
from cp_plugin.methods.with_option import with_option

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
