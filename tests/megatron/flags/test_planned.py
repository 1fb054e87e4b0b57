"""The planner's view of a training command against Megatron's own counts, models, saved activations and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from evidence.experiment import training_flops
from nightly import one_case

from cp_plugin.megatron.planned import command as planned
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.planner.training import activations
from cp_plugin.planner.training.footprint import footprint, whole
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import Parallel
from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.usefixtures("_cpu_megatron")
COMMON = (
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)
LLAMA = (
    f"{COMMON} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --vocab-size 128256"
)
GPT = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 50257 --micro-batch-size 2 --global-batch-size 128 --fp16"
)
MIXTRAL = (
    f"{LLAMA.replace('128256', '32000')} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
    "--expert-model-parallel-size 8"
)
DEEPSEEK = (
    f"{COMMON} --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --vocab-size 129280 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
    "--moe-grouped-gemm --expert-model-parallel-size 64"
)
LEFT_OUT = {"gpt3-1.3b": 2048 * 2048 + 24 * 9 * 2048}
"""Parameters that Megatron's estimate does not count: learned positions, and biases."""
CATALOGUED = {"llama3-8b": LLAMA, "gpt3-1.3b": GPT, "mixtral-8x7b": MIXTRAL, "deepseek-v3": DEEPSEEK}
DIVIDED = (
    "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer",
    "--pipeline-model-parallel-size 4",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 "
    "--use-distributed-optimizer",
    "--mtp-num-layers 1",
)


def counted(flags: str, devices: int) -> tuple[Model, Parallel, float, float]:
    """The planner's view, and Megatron's operations and bytes of parameters and optimizer."""

    def body() -> Any:
        from megatron.training import theoretical_memory_usage as theory
        from megatron.training.training import num_floating_point_operations

        args, settings = planned._validated(flags.split())
        described, parallel = from_args(args, settings)
        args.padded_vocab_size = parallel.padded(args.vocab_size)
        nbytes = theory.compute_weight_and_optimizer_memory(args)
        return described, parallel, num_floating_point_operations(args, args.global_batch_size), nbytes

    return run_ranks(body, 1, env={"WORLD_SIZE": str(devices)}, output="all")[0]


@pytest.mark.parametrize(
    ("flags", "name"),
    [*((flags, name) for name, flags in CATALOGUED.items()), *((f"{LLAMA} {f}", "") for f in DIVIDED)],
)
def test_operations_and_bytes_match_megatron(flags: str, name: str) -> None:
    """Operations of an iteration, bytes of parameters and optimizer; sizes of models in the catalogue."""
    described, p, flops, nbytes = counted(flags, 64)
    assert training_flops(described, p.seq_length, p.global_batch) == pytest.approx(flops, rel=0.01)
    first = footprint(described, p)
    nbytes += 18 * LEFT_OUT.get(name, 0)
    assert first.stage == 0
    assert first.parameters + first.gradients + first.optimizer == pytest.approx(nbytes, rel=2e-3 if name else 5e-3)
    if name:
        total = whole(model(name)).total
        assert whole(described).total == pytest.approx(total, rel=1e-5)


def words_of(planned_flags: str) -> list[str]:
    return f"{training.MODEL} {training.DATA} {training.SGD} --train-iters 1 {planned_flags}".split()


@one_case
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--add-qkv-bias --qk-layernorm --mtp-num-layers 1",
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 32",
        "--cp-linear-attention gla --cp-layer-pattern LN",
        "--cp-linear-attention rebased",
    ],
)
def test_parameters_match_built_models(flags: str) -> None:
    (record,) = training.train(1, flags)
    described, *_ = planned.question(words_of(flags), 1)
    padding = 128 - described.vocab
    got = sum(weight.numel() for weight in record.weights.values())
    assert got == whole(described).total + 2 * padding * described.hidden


FULL = "--recompute-granularity full --recompute-method"
WINDOW = {"window": (127, 0)}
READ: dict[str, tuple[int, dict[str, Any]]] = {
    "--tensor-model-parallel-size 2 --context-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage 4 --use-distributed-optimizer --overlap-grad-reduce --cp-backend flash "
    f"--cp-provider attention2d {FULL} block --recompute-num-layers 3 --fp8-format hybrid": (
        64,
        {"devices": 64, "tensor": 2, "pipeline": 2, "context": 4, "virtual": 4, "sequence_parallel": True}
        | {"zero": 1, "overlap_parameters": False, "recompute": "full", "recompute_layers": 3}
        | {"global_batch": 64, "seq_length": 8192, "gemm_dtype": "float8"},
    ),
    "": (8, {"devices": 8, "overlap_gradients": False, "recompute_attention": False}),
    "--recompute-granularity selective --recompute-modules mlp layernorm": (
        8,
        {"recompute": "selective", "recompute_modules": ("mlp", "layernorm")},
    ),
    f"{FULL} uniform --recompute-num-layers 4 --cp-provider ring --context-parallel-size 2 --cp-recompute-attention": (
        8,
        {"context": 2, "recompute": "full", "recompute_group": 4, "recompute_attention": True},
    ),
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor "
    "--use-distributed-optimizer --no-gradient-accumulation-fusion": (8, {"zero": 3, "overlap_gradients": True}),
    "--window-size 127,0": (8, {"attention_pattern": "W", **WINDOW}),
    "--window-size 127,0 --window-attn-skip-freq 4": (8, {"attention_pattern": "WWWN", **WINDOW}),
    "--window-size 127,0 --window-attn-skip-freq ([1]*31+[0])": (
        8,
        {"attention_pattern": "W" * 31 + "N", **WINDOW},
    ),
    "--cp-linear-attention lightning --cp-layer-pattern LLLN --context-parallel-size 2": (
        8,
        {"attention_pattern": "LLLN", "window": None},
    ),
}
"""Flags -> devices, and what is read from them."""


@pytest.mark.parametrize("flags", READ)
def test_divisions_and_kinds_of_layers(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    devices, expected = READ[flags]
    described, parallel, _ = planned.question(f"{LLAMA} {flags}".split(), devices)
    of = described if "attention_pattern" in expected else parallel
    assert {name: getattr(of, name) for name in expected} == expected
    assert devices != 64 or parallel == Parallel(**expected)
    assert capfd.readouterr() == ("", "")


REFUSED = {
    "--pipeline-model-parallel-size 0": r"^the flags are refused: .*modulo by zero \(megatron/training/arguments.py:",
    "--num-layer 3": r"^--num-layer: no such flag; did you mean .*--num-layers",
    "--num-layers many": r"^--num-layers many: write a whole number$",
    "--checkpoint-activations": r"^--checkpoint-activations is no longer valid, use",
    "--global-batch-size 17": r"^--global-batch-size 17: 64 devices with --tensor-model-parallel-size .* data-parallel",
    "--recompute-granularity selective --recompute-modules atn": r"Invalid choices for recompute_modules: {'atn'}",
    "--context-parallel-size 8 --cp-provider ring --qk-clip": r"--cp-provider ring does not support --qk-clip",
    "--help": r"--help after -- would only print Megatron's flags",
    "--yaml-cfg x.yaml": r"--yaml-cfg x.yaml makes Megatron ignore the command line",
    "--is-hybrid-model --hybrid-layer-pattern M*M*": r"--hybrid-layer-pattern M\*M\*: the planner cannot price",
    "--moe-latent-size 64 --num-experts 8": r"--moe-latent-size 64: the planner cannot price this",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refusals_of_megatron_are_passed_on(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=REFUSED[flags]) as raised:
        planned.question(f"{LLAMA} {flags}".split(), 64)
    assert "Traceback" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_missing_sizes() -> None:
    with pytest.raises(ValueError, match=r"--devices 0: training needs at least 1"):
        planned.question([], 0)
    with pytest.raises(ValueError, match=r"assert args.micro_batch_size is not"):
        planned.question([], 8)


def test_arguments_of_a_running_training(validated: Any) -> None:
    """With the plugin's start-up hooks in place, which ``question`` bypasses."""
    from cp_plugin.megatron import runtime

    args = validated("--context-parallel-size 4 --cp-provider ring")
    described, parallel = from_args(args, runtime.settings())
    assert (described.kv_heads, described.vocab, parallel.context, parallel.dtype) == (2, 127, 4, "float32")
    again, same = planned.question(words_of("--context-parallel-size 4 --cp-provider ring"), 4)[:2]
    assert (again, same) == (described, parallel)


HIDDEN, FFN, SHARED, TOKENS, BATCH = 256, 512, 128, 128, 2
OF_A_LAYER = (
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


def saved_bytes(model: torch.nn.Module) -> list[int]:
    """Bytes of all non-parameter storages that each forward pass saves; to be asked of a training run."""
    from megatron.core.models.gpt import GPTModel

    original, saved = GPTModel.forward, []

    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        weights = {p.untyped_storage().data_ptr() for p in self.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = original(self, *args, **kwargs)
        saved.append(sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights))
        return result

    GPTModel.forward = forward
    return saved


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
    model: str, flags: str, ranks: int, beyond: int, uncounted: int, adapter: None
) -> None:
    """What autograd saves of Megatron's own layers.

    On the CPU Megatron's norms and SwiGLU are torch operations that save more than the fused kernels that are counted:
    each norm two float32 tensors and one number per row instead of its input, SwiGLU two more tensors, and a third if
    its outputs are weighted for experts. RoPE's tables belong to no layer but are created for each.
    """
    measured = []
    for layers in (1, 2):
        words = f"{OF_A_LAYER} {model} --num-layers {layers}"
        first, *_ = training.train(ranks, f"{flags} {PLUGIN}", model=words, ask=saved_bytes)
        measured.append(first.result[0])
    command = f"{words} {training.DATA} {training.SGD} --train-iters 1 {flags} {PLUGIN}"
    described, parallel = planned.question(command.split(), ranks)[:2]
    counted = activations.whole(described, parallel, 0) + beyond
    assert counted <= measured[1] - measured[0] <= counted + uncounted
