"""Training steps over process groups, of Megatron with the self-check and of transformers, against one rank without the
plugin.

Losses and the gradients of step 1 may differ in bfloat16 by twice one rank's difference to float32; in float32 (the
smoke test) by the tolerances of ``tests/training.py``. Every parameter has a limit of its own: in the gradient
of all together, those of queries and keys are too small to be seen.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import provider
from oracle import relative_error
from record import OUT_OF_TIME, NotRun, Step, Verdict, worst
from training import DATA, GRADIENT, LOSS, MODEL, PACKED, SGD
from workers import device, first_failure, join, refused, shared_gpu

from cp_plugin.testing.launch import RankError, run_ranks

RANKS, STEPS = 4, 2
PASSED = "self-check passed"
TWICE = 2.0
LOSSES = "losses"
"""What they are called beside the gradients."""
LEAST = 2e-4
"""Least limit of the losses in bfloat16: two losses may round to the same number by chance."""
TRAIN_S = 90.0
"""Seconds for one training; by estimate it takes 20. One rank goes first, and compiles for the others."""
DECODER_PROVIDERS = ("ring", "attention2d", "ulysses")
DECODER_S = 30.0
"""Seconds for the training steps of a decoder."""
LEARNING_RATE = 0.05
TRAINING = (  # mock documents count up to their length, which must stay below the end-of-document token
    f"{MODEL} {DATA} {SGD} --hidden-size {{hidden}} --ffn-hidden-size {{hidden}} --num-attention-heads 8 "
    "--num-query-groups 4 --seq-length {tokens} --max-position-embeddings {tokens} --vocab-size {vocab} "
    "--micro-batch-size 1 --global-batch-size 2"
)
WITHOUT_LIBRARIES = (
    "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
RESET = "--reset-position-ids --reset-attention-mask"
"""The same documents as a mask in the batch, for Megatron's own attention."""
LINEAR = "--cp-linear-attention gla --cp-layer-pattern LN"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Run(NamedTuple):
    """A training run: flags of context parallelism and of the model."""

    name: str
    flags: str
    model: str = ""
    alone: str | None = None
    """Flags of the model on one rank; None: the same."""
    cp: int = RANKS

    @property
    def parts(self) -> tuple[str, ...]:
        """What it needs, as ``record`` says."""
        words = self.flags.split()
        names = (words[i + 1] for i, word in enumerate(words) if word in ("--cp-provider", "--cp-linear-provider"))
        return tuple(map(provider, names))


RUNS = (
    Run("ring", "--cp-provider ring --cp-layout zigzag"),
    Run("attention2d on striped, grid 2x2", "--cp-provider attention2d --cp-layout striped --cp-grid 2x2"),
    Run("striped", "--cp-provider striped"),
    Run("lasp2 and ring", "--cp-provider ring --cp-linear-provider lasp2 --cp-layout zigzag", LINEAR),
    Run("packed documents, attention2d", "--cp-provider attention2d --cp-grid 2x2", PACKED, RESET),
    Run("recomputed, ring", f"--cp-provider ring --cp-layout zigzag {RECOMPUTED}"),
    Run("ring of 2 beside 2 data-parallel ranks", "--cp-provider ring --cp-layout zigzag", cp=2),
)


def megatron_training(step: Step) -> None:
    title = "Megatron's own training steps"
    if find_spec("megatron") is None:
        step.not_run(title, "megatron-core is not installed: ci/gpu/wheels.sh brings it")
    elif reason := refused(step, RANKS):
        step.not_run(title, reason)
    else:
        preload()
        for run in RUNS:
            step.attempt(
                "Megatron's training", run.name, partial(clocked, partial(compare, run, step), step), run.parts
            )


def huggingface(step: Step) -> None:
    """A small decoder, whose weights are random: nothing is downloaded."""
    title = "training steps of transformers"
    if find_spec("transformers") is None:
        step.not_run(title, "transformers is not installed")
    elif reason := refused(step, RANKS):
        step.not_run(title, reason)
    else:
        import transformers
        import transformers.models.llama.modeling_llama

        import cp_plugin.huggingface  # noqa: F401  (once for all ranks, which are forked)

        title += f" {transformers.__version__}"
        for name in DECODER_PROVIDERS:
            step.attempt(title, name, partial(clocked, partial(compare_decoder, name, step), step), (provider(name),))


def preload() -> None:
    """Import Megatron once for all ranks of all training runs, without initialising CUDA: they are forked."""
    import sides

    sides.preload()
    import cp_plugin.megatron.models.gpt  # noqa: F401


def clocked(compare: Callable[[], Verdict], step: Step) -> Verdict:
    """What a comparison finds, or the failure of a rank; and the seconds."""
    began = time.monotonic()
    try:
        ok, detail = compare()
    except RankError as error:
        print(error, flush=True)
        if step.late:  # the cap ended it, and nothing tells slow ranks from ranks that hang
            raise NotRun(f"{OUT_OF_TIME}, {time.monotonic() - began:.0f} s after it began") from error
        ok, detail = False, {"failure": first_failure(error)}
    return ok, detail | {"seconds": round(time.monotonic() - began, 1)}


def compare(run: Run, step: Step) -> Verdict:
    """Whether everything is right, and the error closest to its limit."""
    alone, half = run.model if run.alone is None else run.alone, "" if step.smoke else "--bf16"
    want = one_rank(train, f"{alone} {half}", step)
    flags = f"{run.model} {half} {run.flags} --context-parallel-size {run.cp}"
    got = train(RANKS, flags, step)
    ok, detail = compare_trained(got, want, limits_of(want, None if step.smoke else one_rank(train, alone, step)))
    wrong = [] if got[0].checked else ["rank 0: no self-check"]
    wrong += [f"rank {n} sent {x.sent} bytes instead of {x.formula}" for n, x in enumerate(got) if x.sent != x.formula]
    return ok and not wrong, detail | ({"failure": "; ".join(wrong)} if wrong else {})


def compare_decoder(name: str, step: Step) -> Verdict:
    """Whether every rank has the losses and gradients of one."""
    dtype = torch.float32 if step.smoke else torch.bfloat16
    want = one_rank(train_decoder, "", dtype, step)
    exact = None if step.smoke else one_rank(train_decoder, "", torch.float32, step)
    return compare_trained(train_decoder(RANKS, name, dtype, step), want, limits_of(want, exact))


def compare_trained(got: Sequence[Trained], want: Trained, limits: Mapping[str, float]) -> Verdict:
    """Whether all ranks have these losses and gradients."""
    by_rank = [differences(of_rank, want) for of_rank in got]
    return worst({name: max(errors[name] for errors in by_rank) for name in limits}, limits)


def limits_of(want: Trained, exact: Trained | None) -> dict[str, float]:
    """Twice as far as one rank in bfloat16 is from ``exact``, itself in float32; None: it is in float32, too."""
    if exact is None:
        return {LOSSES: LOSS} | dict.fromkeys(want.gradients, GRADIENT)
    limits = {name: TWICE * error for name, error in differences(want, exact).items()}
    return limits | {LOSSES: max(LEAST, limits[LOSSES])}


class Trained(NamedTuple):
    """What a rank reports of its training."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the parameters in step 1, float32."""
    sent: dict[tuple[str, str], int]
    formula: dict[tuple[str, str], int]
    checked: bool
    """Whether it reported a passed self-check, which only the first rank does."""


def differences(got: Trained, want: Trained) -> dict[str, float]:
    """Relative differences; infinite if something is missing or not finite."""
    if len(got.losses) != len(want.losses) or got.gradients.keys() != want.gradients.keys():
        return dict.fromkeys((LOSSES, *want.gradients), torch.inf)
    errors = [abs(a / b - 1) for a, b in zip(got.losses, want.losses, strict=True)]
    worst_loss = max(error if error == error else torch.inf for error in errors)
    return {LOSSES: worst_loss} | {name: relative_error(got.gradients[name], x) for name, x in want.gradients.items()}


@cache
def one_rank(train: Callable[..., list[Trained]], *arguments: Any) -> Trained:
    """A training run without the plugin."""
    return train(1, *arguments)[0]


def train(ranks: int, flags: str, step: Step) -> list[Trained]:
    """Train, as ``ranks_in_time`` does."""
    tokens, hidden = (64, 64) if step.smoke else (4096, 512)
    words = f"{TRAINING} --train-iters {STEPS} {flags}".format(tokens=tokens, hidden=hidden, vocab=2 * tokens - 1)
    words += "" if step.smoke else f" {WITHOUT_LIBRARIES}"
    documents = 5 * tokens // 8  # several per sequence
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        return ranks_in_time(rank, ranks, (words, documents, step.devices, Path(log.name)), step, TRAIN_S)


def ranks_in_time(
    call: Callable[..., Trained], ranks: int, arguments: tuple[Any, ...], step: Step, seconds: float
) -> list[Trained]:
    """What all ranks return; RankError if one fails or they do not end in time, NotRun if there is none left."""
    if step.late:
        raise NotRun(OUT_OF_TIME)
    seconds = min(step.left, seconds * (3 if step.smoke else 1))
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return run_ranks(call, ranks, args=arguments, timeout=seconds, env=env)


def rank(words: str, documents: int, devices: int, log: Path) -> Trained:
    assert torch._dynamo.config.disable, "TORCH_COMPILE_DISABLE was set too late: every rank would compile"
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if 0 < devices < ranks:  # each as if on a host with one GPU
        os.environ |= shared_gpu(number) | {"LOCAL_RANK": str(number % devices), "LOCAL_WORLD_SIZE": "1"}
    from sides import Training, train

    record = train(Training(side="plugin", ranks=ranks, flags=words, documents=documents), log=log)
    sys.stdout.flush()
    gradients = {name.replace("module.", ""): x.float() for name, x in record.grads.items()}  # in wrappers by dtype
    return Trained(record.losses, gradients, record.sent, record.formula, PASSED in log.read_text())


def train_decoder(ranks: int, name: str, dtype: torch.dtype, step: Step) -> list[Trained]:
    return ranks_in_time(decoder_rank, ranks, (name, dtype, step.devices), step, DECODER_S)


def decoder_rank(name: str, dtype: torch.dtype, devices: int) -> Trained:
    """Steps of gradient descent; ``name``: the provider, or "" for the model as it is."""
    ranks = int(os.environ["WORLD_SIZE"])
    join(int(os.environ["RANK"]), devices, ranks, DECODER_S)
    model, tokens = decoder(dtype, small=not devices)
    batch = {"input_ids": tokens, "labels": tokens}
    if name:
        from cp_plugin import ContextParallel, huggingface

        cp = ContextParallel(name, group=dist.group.WORLD)
        huggingface.apply(model, cp)
        batch = huggingface.shard(cp, tokens)
    losses, gradients = [], {}
    for _ in range(STEPS):
        loss = model(**batch).loss
        grads = torch.autograd.grad(loss, list(model.parameters()))
        total, *grads = (x.detach().float() for x in (loss, *grads))
        for x in (total, *grads):
            dist.all_reduce(x)
        losses.append(total.item())
        named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
        gradients = gradients or {name: x.cpu() for name, x in named.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= (LEARNING_RATE * named[name]).to(dtype)
    return Trained(losses, gradients, {}, {}, True)


def decoder(dtype: torch.dtype, *, small: bool) -> tuple[Any, torch.Tensor]:
    """A Llama, always with the same weights, and tokens ``[2, s]``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, length = (64, 64) if small else (512, 2048)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        use_cache=False,
    )
    tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).to(device(), dtype).train(), tokens.to(device())
