"""Which kernel of linear attention runs on a device, by what fla and Triton refuse there; calls of the delta rule."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from equipment.cuda.calls import Linear, leaf
from equipment.cuda.device import CUDA, Start, once_warm

from cp_plugin import Options, Problem
from cp_plugin.engine.linear import fla, kernels

CPU, HALF = torch.device("cpu"), Problem(size=4)
PER_HEAD, GATED, PER_KEY = (replace(HALF, decay=decay) for decay in ("head", "token", "key"))
DELTA, GATED_DELTA, KDA = (replace(problem, delta=True) for problem in (HALF, GATED, PER_KEY))
ALL = (HALF, PER_HEAD, GATED, PER_KEY, DELTA, GATED_DELTA, KDA)
HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


def chosen(problem: Problem, device: torch.device = CUDA) -> str:
    return kernels.choose("auto", device, problem).kernel.name


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("triton", ["3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1", "3.8.0+git1"])
def test_a_gated_backward_on_hopper_needs_another_triton(gpu: Start, capability: tuple[int, int], triton: str) -> None:
    """As ``chunk_bwd_dqkwg`` of fla-core 0.6.0 (ops/common/chunk_o.py) refuses, with a gate that two functions pass."""
    gpu(capability=capability, triton=triton)
    bad = capability == HOPPER and triton in ("3.4.0", "3.6.0", "3.7.0")
    refused = {PER_HEAD, GATED, GATED_DELTA} if bad else set()
    assert [p for p in ALL if chosen(p) == "chunked"] == [p for p in ALL if p in refused]
    for problem in refused:
        why = f"Triton {triton} miscompiles the backward .* Hopper .*: Triton 3.7.1 or newer, or one before 3.4.0, is"
        with pytest.raises(ValueError, match=rf"^--cp-backend fla cannot run here: {why} needed; use "):
            kernels.choose("fla", CUDA, problem)
        assert f"plain torch, because fla does not run: Triton {triton}" in kernels.choose("auto", CUDA, problem).why


def test_tilelang_runs_the_gated_delta_rule_alone(gpu: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(triton="3.6.0")
    monkeypatch.setattr(fla, "_tilelang", lambda: True)
    assert [p for p in ALL if chosen(p) == "chunked"] == [PER_HEAD, GATED]


def test_old_gpus_and_old_versions(gpu: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(capability=(7, 5))
    reason = r"need a GPU of compute capability 8\.0 \(Ampere\) or newer, .* has 7\.5; use"
    with pytest.raises(ValueError, match=reason):
        kernels.choose("fla", CUDA, HALF)
    assert chosen(HALF) == chosen(DELTA) == "chunked"
    monkeypatch.setattr(fla, "version", lambda: "0.5.1")
    with pytest.raises(ValueError, match=r"fla-core 0\.5\.1 is too old \(pip install 'fla-core>=0\.5\.2'\)"):
        kernels.choose("fla", CUDA, HALF)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(HALF, dtype=torch.float64), "do not support float64"),
        (replace(DELTA, dtype=torch.float32), "delta-rule kernels support only half precision"),
        (replace(DELTA, head_dim=512), "support keys of at most 256 dimensions, not 512"),
        (replace(HALF, documents=True), "packed documents only with batch size 1"),
    ],
)
def test_what_fla_cannot_compute_anywhere(gpu: Start, problem: Problem, reason: str) -> None:
    gpu()
    with pytest.raises(ValueError, match=f"^--cp-backend fla cannot run here: .*{reason}.*; use "):
        kernels.choose("fla", CUDA, problem)
    assert chosen(problem) == chosen(replace(problem, decay="key")) == "chunked"
    assert chosen(replace(HALF, dtype=torch.float32)) == chosen(replace(HALF, head_dim=512)) == "fla"


@pytest.mark.parametrize("lacks", ["library", "gpu"])
@pytest.mark.parametrize("problem", [PER_KEY, KDA])
def test_a_decay_per_key_asks_for_its_kernels(
    gpu: Start, monkeypatch: pytest.MonkeyPatch, problem: Problem, lacks: str
) -> None:
    """Plain torch is a choice there, and not what ``auto`` falls back to for what the machine lacks."""
    gpu(capability=AMPERE if lacks == "library" else (7, 5))
    monkeypatch.setattr(fla, "installed", lambda: lacks != "library")
    reason = r"is not installed \(pip install 'cp-plugin\[fla\]'\)" if lacks == "library" else "or newer, .* 7.5"
    with pytest.raises(ValueError, match=rf"auto: .*gla.*: .*{reason}\. .* --cp-backend chunked"):
        kernels.choose("auto", CUDA, problem)
    assert kernels.choose("chunked", CUDA, problem).kernel.name == "chunked"
    assert chosen(replace(problem, decay="none")) == "chunked" == chosen(problem, CPU)


@pytest.mark.parametrize(("variant", "triton"), [("lightning", "3.6.0"), ("gla", "3.6.0"), ("lightning", "3.7.1")])
def test_training_is_refused_before_it_starts(gpu: Start, variant: str, triton: str) -> None:
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.flags.linear_flags import Linear as Layers
    from cp_plugin.megatron.rules import checks

    gpu(triton=triton)
    reason = r"^--cp-backend fla cannot run here: Triton 3\.6\.0 miscompiles .*; use "
    for backend in ("fla", "auto"):
        settings = Settings(linear=Layers(variant=variant, options=Options(backend=backend)))
        model = checks.resolve(settings, HALF)
        refused = (variant, triton, backend) == ("lightning", "3.6.0", "fla")
        with pytest.raises(ValueError, match=reason) if refused else nullcontext():
            checks._check_kernels(settings, model, CUDA)


@pytest.mark.parametrize("provider", ["lasp2", "lasp1", "zeco"])
@pytest.mark.parametrize("decay", [None, (), (16,)], ids=["no decay", "a decay per token", "a decay per key"])
def test_fla_runs_the_delta_rule_once_in_each_pass(gpu: Start, provider: str, decay: tuple[int, ...] | None) -> None:
    """Outputs and maps from one call; in the backward pass one more call and its backward, and no triangular system."""
    name = {None: "chunk_delta_rule", (): "chunk_gated_delta_rule", (16,): "chunk_kda"}[decay]
    device, tokens = gpu(), 128
    q, k, v, beta = leaf(tokens, 1, 4, 16), leaf(tokens, 1, 2, 16), leaf(tokens, 1, 2, 16), leaf(tokens, 1, 2)
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": beta}
    if decay is not None:
        inputs["log_decay"] = leaf(tokens, 1, 2, *decay, dtype=torch.float32)
    cp = Linear(variant="basic", provider=provider, backend="auto").context_parallel()
    leaves = list(inputs.values())

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, torch.empty_like(out), retain_graph=True)

    out = once_warm(device, lambda: cp.linear_attention(**inputs))
    assert _library_calls(device.ops.launches) == [f"fla {name} forward"]
    grads = once_warm(device, lambda: backward(out))
    assert [g.shape for g in grads] == [x.shape for x in inputs.values()]
    assert _library_calls(device.ops.launches) == [f"fla {name} forward", f"fla {name} backward"]


def _library_calls(launches: list[Any]) -> list[str]:
    assert not any("triangular" in launch.name for launch in launches)
    return [launch.name for launch in launches if launch.name.startswith("fla ")]
