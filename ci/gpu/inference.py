"""Prefill and decode of every provider on rank threads, compared as ``cp-plugin verify --decode`` does."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch
from cases import cannot, provider
from record import Found, Step, worst

from cp_plugin import Options, Problem
from cp_plugin.engine.attention.calls import Setup
from cp_plugin.testing import verify, verify_decode

PROBLEM = Problem(
    size=4, batch=2, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, seq_length=256, dtype=torch.bfloat16
)
TINY = Problem(size=2, batch=2, heads=2, kv_heads=1, head_dim=16, v_head_dim=16, seq_length=16, dtype=torch.bfloat16)


def main() -> None:
    with Step("inference") as step:
        problems = [TINY if step.smoke else PROBLEM]
        in_fp8 = [setup for setup in verify_decode.plan([], problems, Options(fp8="comm")) if setup.options.fp8]
        for setup in verify_decode.plan([], problems, Options()) + in_fp8:
            decay = f", a decay of each {setup.problem.decay}" if setup.provider.kind == "linear" else ""
            fp8 = ", --cp-fp8 comm" if setup.options.fp8 else ""
            name = f"{setup.provider.name} on {setup.layout}{decay}{fp8}"
            if reason := cannot(setup, step.device):
                step.not_run(f"inference: {name}", reason)
            else:
                call, of = partial(right, setup, step.device.type), (provider(setup.provider.name), "kernel decode")
                step.attempt("prefill and decode, ranks as threads", name, call, of)


def right(setup: Setup, device: str) -> Found:
    """Compare the four outputs of a setup."""
    with patch.object(verify, "refuse_too_large", lambda *_, **__: 60.0):  # it is small, and psutil may be missing
        (found,) = verify.verify([setup], device, threads=True, check=verify_decode.GENERATION)
    return (False, {"failure": found.failure}) if found.failure else worst(found.errors, found.limits)


if __name__ == "__main__":
    main()
