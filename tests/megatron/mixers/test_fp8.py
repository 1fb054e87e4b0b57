"""``--cp-fp8`` in Megatron: losses and bytes of a training run, scales, self-check, refusals."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_rows import instead
from nightly import nightly, one_case
from torch import Tensor
from training import train

from cp_plugin import Options
from cp_plugin.engine.core.scaling import IN_BACKWARD, ROLES, Delayed

pytestmark = pytest.mark.usefixtures("adapter")

BF16 = "--bf16"
COMPUTE = f"{BF16} --cp-provider striped --cp-fp8 compute --cp-backend float8"
DELAYED = f"{COMPUTE} --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3 --fp8-amax-compute-algo max"


def test_every_flag_of_delayed_scaling_reaches_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.mixers import fp8_scaling

    settings = argparse.Namespace(options=Options(fp8="compute"))
    monkeypatch.setattr(runtime, "settings", lambda: settings)
    flags = {"fp8_amax_history_len": 5, "fp8_amax_compute_algo": "max", "fp8_margin": 3}
    config = argparse.Namespace(fp8="hybrid", fp8_recipe="delayed", **flags)
    delayed = fp8_scaling.make_scaling(config)
    assert (delayed.length, delayed.algorithm, delayed.margin, delayed.roles) == (5, "max", 3, ROLES)
    for other in ({"fp8": None}, {"fp8_recipe": "tensorwise"}):
        current = fp8_scaling.make_scaling(argparse.Namespace(**vars(config) | other))
        assert (current.length, current.margin, current.roles) == (1, 2, IN_BACKWARD)
    settings.options = Options(fp8="comm")
    assert fp8_scaling.make_scaling(config) is None


def histories(model: torch.nn.Module) -> list[Tensor]:
    """All layers' histories before and after each iteration's update; to be asked of a training run.

    Shape: ``[layers, iterations + 1, roles]``; the last row is what scales are taken from.
    """
    from cp_plugin.megatron.mixers import fp8_scaling as scaling
    from cp_plugin.megatron.state import STATE

    update, kept = scaling.update, []

    def keeping(chunks: Sequence[torch.nn.Module]) -> None:
        if STATE.trial:  # the self-check's step has scales of its own
            return update(chunks)
        scalings = [m.scaling for c in chunks for m in c.modules() if isinstance(getattr(m, "scaling", None), Delayed)]

        def remembered() -> Tensor:
            return torch.stack([torch.cat((s.history, s._known.unsqueeze(0))) for s in scalings])

        kept.append(remembered())
        update(chunks)
        kept.append(remembered())

    scaling.update = keeping
    return kept


def kept(ranks: int, flags: str, **more: Any) -> list[list[Tensor]]:
    """The histories of every rank."""
    return [record.result for record in train(ranks, flags, ask=histories, **more)]


def test_only_the_tensor_and_context_parallel_ranks_if_megatron_says_so() -> None:
    """Two data-parallel replicas of CP 2; ``tp_only_amax_red`` has no flag."""
    flags = f"{DELAYED} --context-parallel-size 2 --micro-batch-size 1"
    first, second, third, fourth = (rank[1] for rank in kept(4, flags, prepare=_tp_only))
    assert torch.equal(first, second) and torch.equal(third, fourth) and not torch.equal(first, third)


def _tp_only() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    TransformerConfig.tp_only_amax_red = property(lambda self: True, lambda self, value: None)


@instead("cp_plugin.megatron.mixers.core_attention:CoreAttention.__init__")
def roles_of_the_backward_pass(init: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    init(layer, *args, **kwargs)
    assert layer.scaling.roles == ("dp", "dqkv")


@one_case
@pytest.mark.parametrize("recipe", ["", "--fp8-format hybrid --fp8-recipe tensorwise"])
def test_current_scaling_remembers_what_only_the_kernel_knows(recipe: str) -> None:
    flags = f"{COMPUTE} --context-parallel-size 2 --micro-batch-size 1 {recipe}"
    first, *others = (rank[1] for rank in kept(4, flags, prepare=roles_of_the_backward_pass))
    assert first.shape == (2, 2, 7) and (first > 0).all()
    assert all(torch.equal(first, other) for other in others), "over data-parallel ranks, too"


@nightly
def test_evaluation_is_not_remembered_and_recomputation_changes_nothing() -> None:
    flags = f"{COMPUTE} --context-parallel-size 2"  # Megatron recomputes its own FP8 layers on CUDA only
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    runs = {
        "plain": "",
        "once": f"{full} --eval-iters 1 --eval-interval 1",
        "twice": f"{full} --cp-recompute-attention",
    }
    records = {name: train(2, f"{flags} {more}", steps=2, ask=histories)[0] for name, more in runs.items()}
    assert all(torch.equal(record.result[-1], records["plain"].result[-1]) for record in records.values()), records
    assert all(record.losses == records["plain"].losses for record in records.values()), records


@nightly
def test_histories_in_checkpoints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Resumed on other numbers of ranks, with another length, by stock Megatron, and from a checkpoint of that."""
    common = "--make-vocab-size-divisible-by 64 --ckpt-format torch_dist"
    load = f"{common} --load {tmp_path} --no-load-optim --override-opt-param-scheduler --ckpt-step"
    save = f"--save {tmp_path} --save-interval"
    shorter = DELAYED.replace("history-len 3", "history-len 2")

    def run(ranks: int, flags: str, steps: int) -> tuple[list[list[Tensor]], bool]:
        """Histories of all ranks, and whether it was told that they start anew."""
        tensors = kept(ranks, flags, steps=steps)
        return tensors, "the history of attention's FP8 scales restarts" in capfd.readouterr().out

    ((*_, saved), _), told = run(2, f"{DELAYED} --context-parallel-size 2 {common} {save} 2", 2)
    assert saved[:, :2].all() and not told
    on_four = f"{DELAYED} --context-parallel-size 2 --tensor-model-parallel-size 2 {load} 2"
    ((before, after), *others), told = run(4, on_four, 3)
    assert torch.equal(before, saved) and torch.equal(after[:, 1:3], before[:, :2]) and not told
    assert all(torch.equal(rank[0], before) for rank in others)
    ((before, _), _), told = run(2, f"{shorter} --context-parallel-size 2 {load} 2", 3)
    assert not before.any() and told
    train(1, f"{BF16} {load} 2 {save} 3", steps=3)
    ((before, _), _), told = run(2, f"{DELAYED} --context-parallel-size 2 {load} 3", 4)
    assert not before.any() and told
