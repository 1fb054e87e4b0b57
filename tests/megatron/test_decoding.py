"""Generation from Megatron models with linear layers: token by token the same logits as the whole text at once."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import DATA, MODEL, SGD
from torch import Tensor

from cp_plugin.launch import RankError, run_ranks
from cp_plugin.linear.variants import VARIANTS

pytestmark = pytest.mark.usefixtures("adapter")

LAYERS = MODEL.replace("--num-layers 2", "--num-layers 4")


def with_model(check: Any, flags: str, ranks: int = 1) -> list[Any]:
    """Start a training, and call ``check`` with the model in the place of its first step."""

    def rank() -> Any:
        from cp_plugin.megatron import activate

        found = []
        sys.argv = ["pretrain_gpt.py", *f"{LAYERS} {DATA} {SGD} --train-iters 1 {flags}".split()]
        activate()
        from megatron.training import training

        step = training.train_step

        def train_step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(check(model[0]))
            return step(forward_step, data, model, *args, **kwargs)

        training.train_step = train_step
        runpy.run_module("cp_plugin.pretrain_gpt", run_name="__main__", alter_sys=True)
        return found[0]

    return run_ranks(rank, ranks, timeout=120)


def logits_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Of a whole text at once, over all tensor-parallel ranks."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    return gather_from_tensor_model_parallel_region(model(tokens, positions, None))


def refused(model: torch.nn.Module) -> None:
    from cp_plugin.megatron.decoding import decoding

    with decoding(model):
        raise AssertionError("not refused")


def token_by_token(model: torch.nn.Module) -> tuple[float, list[dict[int, int]], bool]:
    """How far the logits are from those of the whole text, what each layer keeps, and whether greedy tokens agree."""
    from cp_plugin.megatron.decoding import decoding, extend, generate

    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = logits_of(model, tokens)
        with decoding(model) as so_far:
            parts, sizes = [], []
            for part in (slice(0, 9), *(slice(t, t + 1) for t in range(9, 24))):
                parts.append(extend(model, so_far, tokens[:, part]))
                sizes.append({number: kept.nbytes for number, kept in so_far.layers.items()})
        assert torch.equal(whole, logits_of(model, tokens)), "the model is as it was"
        text = tokens[:, :9]
        for _ in range(4):
            text = torch.cat((text, logits_of(model, text)[:, -1:].argmax(-1)), 1)
        greedy = torch.equal(text, generate(model, tokens[:, :9], 4))
    stepwise = torch.cat(parts, 1)
    return ((stepwise - whole).norm() / whole.norm()).item(), sizes, greedy


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_in_a_hybrid(variant: str) -> None:
    ((error, sizes, greedy),) = with_model(token_by_token, f"--cp-linear-attention {variant} --cp-layer-pattern LLLN")
    assert error <= 1e-5 and greedy
    for number in (1, 2, 3):
        assert len({kept[number] for kept in sizes}) == 1, "a state does not grow"
    assert [kept[4] for kept in sizes] == [kept[4] * n // 9 for n in range(9, 25) for kept in sizes[:1]]


def test_only_one_context_parallel_rank() -> None:
    with pytest.raises(RankError, match="generation runs on --context-parallel-size 1"):
        with_model(refused, "--cp-linear-attention basic --context-parallel-size 2", ranks=2)


def test_heads_divided_over_tensor_parallel_ranks() -> None:
    flags = "--cp-linear-attention gla --cp-layer-pattern LN --tensor-model-parallel-size 2 --sequence-parallel"
    with pytest.raises(RankError, match="without --sequence-parallel"):
        with_model(refused, flags, ranks=2)
    for error, _, greedy in with_model(token_by_token, flags.replace("--sequence-parallel", ""), ranks=2):
        assert error <= 1e-5 and greedy


def test_the_command_goes_on_from_a_checkpoint_of_other_ranks(tmp_path: Path) -> None:
    """Trained on two ranks, saved, and continued on one; the text is that of the same weights, chosen greedily."""
    hybrid = "--cp-linear-attention lightning --cp-layer-pattern LN --ckpt-format torch_dist"
    common = f"{MODEL} {DATA} {SGD} --train-iters 1 {hybrid} --make-vocab-size-divisible-by 64"
    saved = f"--nproc 2 {common} --context-parallel-size 2 --save {tmp_path} --save-interval 1"
    assert command("cp_plugin.pretrain_gpt", saved).returncode == 0
    said = [command("cp_plugin.generate", f"--prompt abc --bytes --new-tokens 5 {common} --load {tmp_path}")]
    said += [command("cp_plugin.generate", f"--nproc 1 {common} --prompt abc --bytes --new-tokens 5 --load {tmp_path}")]
    for done in said:
        assert done.returncode == 0, done.stderr
        assert "5 tokens in" in done.stdout and "abc" in done.stdout
    refused = command("cp_plugin.generate", f"--prompt abc {common}")
    assert refused.returncode == 1 and "add --load with the directory of a checkpoint" in refused.stderr


def command(module: str, words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *words.split()], capture_output=True, text=True, timeout=150, env=environment
    )
