"""The check of one step, on N context-parallel ranks and on one: what it says, costs, and leaves as it is."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from case import Case, cases
from feature_faults import STRIPED, change_slices
from nightly import nightly, one_case
from state_space_kernels import STATES
from test_planted_faults import called_with
from torch import Tensor
from training import assert_same_bits, train

from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.engine.core.layout import LAYOUTS
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.selfcheck import readings, tiny_batch
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

STOCK = "--context-parallel-size 2 --cp-provider upstream --cp-selfcheck once"
CHECKED, OFF = "--cp-selfcheck strict --cp-check-every 1", "--cp-selfcheck off --cp-check-every 0"


CHECKED_CASES = [pytest.param(case, id=case.name) for case in cases() if "check" in case.where]


@one_case
@pytest.mark.parametrize("case", CHECKED_CASES)
def test_the_checks_leave_nothing_behind(case: Case) -> None:
    """With the start-up check and checks of every step, a run has the results of one without any, to the bit."""
    checked, without = (case.start(more, steps=3) for more in (CHECKED, OFF))
    assert_same_bits(checked, without)
    for one, other in zip(checked, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.mtp_losses, other.mtp_losses, strict=True))
        assert all(torch.equal(one.weights[key], weight) for key, weight in other.weights.items())


def _fail_in_trial(batch: dict[str, Tensor]) -> None:
    from cp_plugin.megatron.state import STATE

    if STATE.trial:
        raise KeyError("a name of this fork")


def test_a_step_that_cannot_be_run_is_reported_and_the_run_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="--cp-selfcheck strict: the check of a training step could not be run: KeyErr"):
        train(2, f"{STRIPED} --cp-selfcheck strict", prepare=change_slices(_fail_in_trial, ""))
    got = train(2, STRIPED, prepare=change_slices(_fail_in_trial, ""))
    assert "the check of a training step could not be run: KeyError: 'a name of this fork'" in capfd.readouterr().out
    assert [record.losses for record in got] == [record.losses for record in train(2, f"{STRIPED} {OFF}")]

    def with_a_fault() -> None:
        change_slices(_fail_in_trial, "")()
        called_with("wrong scale", scale=1.01 / 4)()

    with pytest.raises(RankError, match="AttentionError: --cp-check-every: in step 1, layer"):
        train(2, STRIPED, steps=2, prepare=with_a_fault)


def test_stock_context_parallelism_of_states_is_compared_too(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"{STOCK} --hybrid-layer-pattern M- {STATES}")
    assert "self-check passed: a step of 32 tokens on 2 context-parallel ranks equals" in capfd.readouterr().out


@pytest.mark.skipif(version_tuple(megatron_version())[:2] != (0, 19), reason="sparse attention of megatron-core 0.19")
def test_the_indexer_of_stock_sparse_attention_is_trained_twice_as_strongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of release 0.19: without ``--calculate-per-token-loss`` its gradients are CP times one rank's."""
    from cp_plugin.megatron.models import gpt

    flags = (
        f"{STOCK} --bf16 --cp-comm-type allgather --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --q-lora-rank 32 --experimental-attention-variant dsa "
        "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.1"
    )
    monkeypatch.setattr(gpt, "UNSUPPORTED", ())
    with pytest.raises(RankError, match=r"linear_wq_b\.weight by .*; it is (2|1\.9|2\.0)\d* times that of one rank"):
        train(2, flags, prepare=_sparse_attention_on_the_cpu)


def _sparse_attention_on_the_cpu() -> None:
    from megatron.core.models import backends
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa

    class Plain(torch.nn.Linear):
        def __init__(self, rows: int, columns: int, *, init_method: Any, bias: bool = False, **unused: Any) -> None:
            super().__init__(rows, columns, bias=bias)
            init_method(self.weight)

        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    def hadamard(x: Tensor, scale: float) -> Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < x.size(-1):
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        return (x.float() @ matrix * scale).to(x.dtype)

    dsa.hadamard_transform, absorbed_mla.TELinear = hadamard, Plain
    backends.LocalSpecProvider.linear = lambda self: Plain
    specs._get_backend_spec_provider = lambda **unused: backends.LocalSpecProvider()
    sys.modules["cp_plugin.megatron.models.gpt"].get_gpt_decoder_block_spec = lambda config, **unused: (
        specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    )


def test_embeddings_are_moved_inside_wrappers_of_any_class() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model, ids = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(8, 4)}), torch.arange(8)
    with tiny_batch.noisy([Wrapper(Wrapper(model))], 1, 0.1):
        moved = model.embedding(ids)
    torch.testing.assert_close((moved / model.embedding(ids) - 1).abs(), torch.full((8, 4), 0.1))


def test_a_gradient_that_is_a_multiple_is_named() -> None:
    flat = [torch.randn(50, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    same, moved, many = (
        readings.Result(readings.projections(x), {"loss": 2.0})
        for x in (flat, [x * (1 + 1e-7) for x in flat], [flat[0], 4 * flat[1], flat[2] * (1 + 5e-7)])
    )
    alone = readings.Reference(same)
    alone.moved.append(moved)
    assert alone.differences(same, "abc", 1e-5) == []
    (problem,) = alone.differences(many, "abc", 1e-5)
    assert problem.startswith("the gradient of b by") and problem.endswith("the first of 1 of 3 that differ")
    assert "; it is 4 times that of one rank)" in problem


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("size", "chunk"), [(1, 128), (2, 128), (3, 128), (16, 128), (24, 80), (64, 32), (512, 16)])
def test_gpu_ranks_have_two_chunks_of_up_to_128_tokens(name: str, size: int, chunk: int) -> None:
    layout = get_layout(name)
    tokens = tiny_batch.tokens_for(layout, size, cuda=True)
    assert tokens == 2 * chunk * size
    for index in range(size):
        assert all(len(segment) % chunk == 0 for segment in layout.segments(tokens, size, index))


@pytest.mark.parametrize(("name", "size", "tokens"), [("zigzag", 2, 32), ("zigzag", 64, 128), ("striped", 3, 33)])
def test_cpu_ranks_have_few_tokens(name: str, size: int, tokens: int) -> None:
    assert tiny_batch.tokens_for(get_layout(name), size, cuda=False) == tokens


DRAWN = ("--moe-router-force-load-balancing", "--moe-input-jitter-eps 1e-2 --init-method-std 0.2")


@pytest.mark.parametrize("flags", DRAWN)
def test_routers_that_draw_are_compared_without_drawing(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"--num-experts 4 {flags} --context-parallel-size 2 --cp-provider ring --cp-layout zigzag")
    assert capfd.readouterr().out.count("self-check passed: a step") == 1


def _as_on_a_gpu() -> None:
    tokens_for = tiny_batch.tokens_for
    tiny_batch.tokens_for = lambda layout, size, *, cuda: tokens_for(layout, size, cuda=True)


@nightly
@one_case
@pytest.mark.parametrize("case", CHECKED_CASES)
def test_self_check_passes_at_gpu_size(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case.start("", prepare=_as_on_a_gpu)
    assert "self-check passed" in capfd.readouterr().out
