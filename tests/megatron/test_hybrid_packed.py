"""A packed hybrid model (attention, Mamba, gated delta net) beside all that divides a training: as on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SGD, train
from nightly import one_case, slow
from parity import check, stock
from state_space_kernels import STATES
from test_memory_features import ADAM, MEGATRON_FSDP, OVERLAP, STEPS, same_losses
from test_packed_models import HYBRID, PACKED, RECOMPUTE, with_documents

from cp_plugin.core.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version
from cp_plugin.methods import registry as providers

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]

MODEL = f"--hybrid-layer-pattern MG*- {STATES} {PACKED}"
INTERLEAVED = (
    f"--hybrid-layer-pattern M*|G-|M*|*- --pipeline-model-parallel-size 2 --micro-batch-size 1 {STATES} {PACKED}"
)
KERNELS = {"prepare": with_documents, "alone": with_documents}


@slow
@pytest.mark.parametrize("provider", providers.names(kind="softmax"))
def test_every_provider(provider: str) -> None:
    check(MODEL, f"--cp-provider {provider}", cp=4, model=HYBRID, **KERNELS)


@slow
@one_case
@pytest.mark.parametrize("flags", [INTERLEAVED, f"{INTERLEAVED} {RECOMPUTE}"], ids=["kept", "recomputed"])
def test_an_interleaved_pipeline(flags: str) -> None:
    check(flags, "--cp-provider striped", cp=2, ranks=2, model=HYBRID, **KERNELS)


@slow
def test_eight_context_parallel_ranks() -> None:
    states = STATES.replace("heads 4", "heads 8")
    model = f"--hybrid-layer-pattern MG*- {states} {PACKED}"
    check(model, "--cp-provider attention2d --cp-grid 4x2 --cp-layout striped", cp=8, model=HYBRID, **KERNELS)


@one_case
@pytest.mark.parametrize("layout", ["striped", "ring --cp-layout zigzag"])
def test_the_distributed_optimizer(layout: str) -> None:
    divided = f"{OVERLAP} --context-parallel-size 2 --cp-provider {layout}"
    got = train(2, f"{MODEL} {divided}", steps=STEPS, model=HYBRID, prepare=with_documents)
    same_losses(got, stock(1, f"{MODEL} {OVERLAP}", steps=STEPS, model=HYBRID, prepare=with_documents))


@slow
@pytest.mark.parametrize("layout", ["striped", "ring --cp-layout zigzag"])
def test_megatron_fsdp(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("einops")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # with 1, which orders communication by queues, it refuses
    divided = f"{ADAM} {MEGATRON_FSDP} --context-parallel-size 2 --cp-provider {layout}"
    got = train(2, f"{MODEL} {divided}", steps=STEPS, model=HYBRID, prepare=with_documents)
    same_losses(got, stock(1, f"{MODEL} {ADAM}", steps=STEPS, model=HYBRID, prepare=with_documents))


@slow
def test_a_checkpoint_resumed_on_other_ranks(tmp_path: Path) -> None:
    adam = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 0.001")
    common = {"steps": 4, "model": HYBRID, "training": adam, "prepare": with_documents}
    flags = f"{MODEL} --cp-provider striped --ckpt-format torch_dist"
    whole = train(2, f"{flags} --context-parallel-size 2 --save {tmp_path} --save-interval 2", **common)[0].losses
    load = f"--load {tmp_path} --ckpt-step 2 --override-opt-param-scheduler"
    rest = train(4, f"{flags} --context-parallel-size 4 {load}", **common)[0].losses
    assert rest == pytest.approx(whole[2:], rel=1e-5)
