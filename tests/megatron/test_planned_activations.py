"""The planner's activation sizes against what autograd saves of Megatron's own layers.

On the CPU Megatron's norms and SwiGLU are torch operations that save more than the fused kernels that are counted:
each norm two float32 tensors and one number per row instead of its input, SwiGLU two more tensors, and a third if its
outputs are weighted for experts. RoPE's tables belong to no layer but are created for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import training
from nightly import one_case

from cp_plugin.megatron.planned import command as planned
from cp_plugin.planner.training import activations

HIDDEN, FFN, SHARED, TOKENS, BATCH = 256, 512, 128, 128, 2
SIZES = (
    f"--hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 8 --seq-length {TOKENS} "
    f"--max-position-embeddings {TOKENS} --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 "
    "--disable-bias-linear --bf16 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm"
)
GROUPED = "--group-query-attention --num-query-groups 2"
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --qk-layernorm"
)
EXPERTS = f"{GROUPED} --num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size {SHARED}"
PLUGIN = "--context-parallel-size 2 --cp-provider ring --cp-layout zigzag --cp-selfcheck off"
ROWS = TOKENS // 2 * BATCH


def norm(rows: int, width: int) -> int:
    """Bytes that torch's norm saves beyond its input."""
    return rows * (2 * 4 * width + 4 - 2 * width)


def tables(size: int) -> int:
    """RoPE's sines and cosines, for queries and keys."""
    return 4 * TOKENS // 2 * size * 2


def watch(path: Path) -> Callable[[], None]:
    """Write the bytes of all non-parameter storages that the first forward saves to a file."""

    def prepare() -> None:
        from megatron.core.models.gpt import GPTModel

        original = GPTModel.forward

        def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
            weights = {p.untyped_storage().data_ptr() for p in self.parameters()}
            kept: dict[int, torch.Tensor] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = original(self, *args, **kwargs)
            sizes = [t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights]
            if os.environ["RANK"] == "0" and not path.exists():
                path.write_text(str(sum(sizes)))
            return result

        GPTModel.forward = forward

    return prepare


@one_case
@pytest.mark.parametrize(
    ("model", "flags", "ranks", "beyond", "uncounted"),
    [
        (
            GROUPED,
            "--tensor-model-parallel-size 2 --sequence-parallel",
            4,
            2 * norm(ROWS // 2, HIDDEN) + 2 * ROWS * FFN // 2 * 2 + tables(32),
            0,
        ),
        (
            LATENT,
            "",
            2,
            # the key's rotated part shares the storage of the compressed key, which only the norm's copy saves
            2 * norm(ROWS, HIDDEN) + norm(ROWS, 64) + norm(ROWS, 32) - ROWS * 16 * 2 + 2 * ROWS * FFN * 2 + tables(16),
            0,
        ),
        (
            EXPERTS,
            "",
            2,
            2 * norm(ROWS, HIDDEN) + 2 * ROWS * SHARED * 2 + 3 * 2 * ROWS * FFN * 2 + tables(32),
            32 * ROWS,  # indices of the router
        ),
    ],
    ids=["grouped", "latent", "experts"],
)
def test_saved_activations_of_a_layer(
    model: str, flags: str, ranks: int, beyond: int, uncounted: int, tmp_path: Path, adapter: None
) -> None:
    measured = []
    for layers in (1, 2):
        path, words = tmp_path / str(layers), f"{SIZES} {model} --num-layers {layers}"
        training.train(ranks, f"{flags} {PLUGIN}", model=words, prepare=watch(path))
        measured.append(int(path.read_text()))
    command = f"{words} {training.DATA} {training.SGD} --train-iters 1 {flags} {PLUGIN}"
    found, parallel = planned.question(command.split(), ranks)[:2]
    counted = activations.whole(found, parallel, 0) + beyond
    assert counted <= measured[1] - measured[0] <= counted + uncounted
