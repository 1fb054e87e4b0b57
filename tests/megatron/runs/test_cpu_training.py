"""Stock Megatron in CPU mode: sequence parallelism, experts, latent attention, and what needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nightly import one_case
from training import LOSS, SGD, differences, train

from cp_plugin.testing.launch import RankError

STEPS = 5
ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 1e-3")

pytestmark = pytest.mark.usefixtures("adapter")


def test_sequence_parallel_ranks_train_as_one_does() -> None:
    """Cases compare runs with the same tensor parallelism, in which norms could be wrong on both sides."""
    flags = "--make-vocab-size-divisible-by 64"
    parallel = f"{flags} --tensor-model-parallel-size 2 --sequence-parallel"
    got, want = (train(ranks, f, steps=STEPS, training=ADAM)[0].losses for ranks, f in ((2, parallel), (1, flags)))
    assert len(got) == STEPS and got == pytest.approx(want, rel=1e-5)


@one_case
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["striped", "ring --cp-layout zigzag"])
def test_experts_on_the_context_parallel_ranks(layout: str, dispatcher: str) -> None:
    """Each holds the experts that it would hold as a data-parallel rank.

    Megatron gives torch the sizes of the exchange as tensors where they are not on a CUDA device.
    """
    model = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    model += f"--moe-token-dispatcher-type {dispatcher}"
    want = train(2, model, steps=3)
    got = train(2, f"{model} --context-parallel-size 2 --cp-provider {layout}", steps=3)
    assert max(differences(got[0].losses, want[0].losses)) <= LOSS
    for record, base in zip(got, want, strict=True):
        assert any("experts" in name for name in base.grads)
        for name, grad in base.grads.items():
            assert torch.equal(record.weights[name], base.weights[name])
            assert (record.grads[name] - grad).norm() <= 1e-4 * grad.norm(), name


def test_multi_latent_attention_of_stock_megatron() -> None:
    """With values of another size than keys; the reference is written out in textbook."""
    import textbook

    got, want = (
        train(1, steps=STEPS, model=textbook.MLA, training=ADAM, prepare=prepare)[0].losses
        for prepare in (None, textbook.install)
    )
    assert len(got) == STEPS and got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("pattern", "kernels"), [("M*-", "M in .* M[*]-: the kernels of Mamba"), ("*G", "G in .* [*]G: the kernels of gat")]
)
def test_kernels_of_cuda_are_named_before_the_model_is_built(pattern: str, kernels: str) -> None:
    with pytest.raises(RankError, match=f"ValueError: {kernels}.* run only on CUDA. Train on a GPU"):
        train(1, f"--hybrid-layer-pattern {pattern}", modules=None)


def test_a_saved_distributed_optimizer(tmp_path: Path) -> None:
    """Read with torch's Adam, all its parameters would share one count of steps, or there is none."""
    files = f"--use-distributed-optimizer --ckpt-format torch_dist --save-interval 2 --save {tmp_path}/0"
    begun = train(1, f"{files} --load {tmp_path}/0", steps=2, training=ADAM)[0].losses
    assert len(begun) == 2, "nothing is saved there yet"
    with pytest.raises(RankError, match=r"ValueError: --load .*/0 with --use-distributed-optimizer on the CPU: "):
        train(1, f"{files} --load {tmp_path}/0", steps=4, training=ADAM)
    weights = train(1, f"{files}a --load {tmp_path}/0 --no-load-optim", steps=4, training=ADAM)[0].losses
    assert len(weights) == 2
