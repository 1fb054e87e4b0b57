"""``--cp-fp8``: FP8 payloads around any method, and FP8 kernels.

    comm      two-byte payloads travel as one byte an element (``engine.comm.payload``)
    compute   and the kernel computes in FP8: Transformer Engine's, or the reference of its numerics

Methods need not know: the mesh packs payloads, and ``Problem`` counts bytes as they travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.engine.comm.payload import TWO_BYTES, PayloadMesh
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.options import AUTO, Option, Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled, spelled_dtypes
from cp_plugin.engine.kernels.backends import fp8_kernels
from cp_plugin.engine.methods.protocol import Provider, with_option

FP8 = Option(
    "fp8",
    metavar="WHAT",
    meaning="comm: send attention's 16-bit tensors in 8 bits per element, as e4m3 with a power-of-two scale per block "
    "of tokens and head; compute: also run the attention kernel in FP8 (Transformer Engine, Hopper)",
    default="everything in the model's dtype",
    choices=("comm", "compute"),
    unset="off",
)


def with_payloads(inner: Provider) -> Provider:
    return with_option(
        inner,
        FP8,
        as_sent=lambda problem, options: problem.with_transport(fp8=options.fp8 is not None),
        over=lambda mesh, problem: PayloadMesh(mesh, problem.shared) if problem.transport.fp8 else mesh,
        refused=_refused,
    )


def _refused(problem: Problem, options: Options) -> str | None:
    if options.fp8 is None or problem.dtype in TWO_BYTES:
        return None
    name = dtype_name(problem.dtype)
    return f"{spelled(FP8, options.fp8)}: {name} has no 16-bit payloads to shrink; use {spelled_dtypes(torch.bfloat16)}"


def check(options: Options) -> None:
    """ValueError for ``compute`` with a kernel that does not compute in FP8, or such a kernel without ``compute``."""
    kernels = fp8_kernels()
    if options.fp8 == "compute" and options.backend not in (AUTO, *kernels):
        raise ValueError(
            f"{spelled(FP8, 'compute')} needs a kernel that computes in FP8, which "
            f"{spelled('backend', options.backend)} does not: use {spelled('backend', *kernels)}, or "
            f"{spelled(FP8, 'comm')}"
        )
    if options.fp8 != "compute" and options.backend in kernels:
        raise ValueError(
            f"{spelled('backend', options.backend)} computes in FP8: add {spelled(FP8, 'compute')}, or leave it out"
        )


def four_bits(x: Tensor) -> Tensor:
    """``x`` with four significant bits, like e4m3, but without a limit on small elements.

    Independent of the packing, so that error limits do not move with a bug in it.
    """
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(x.dtype)
