"""Megatron's training loop over process groups, with the self-check, against one rank without the plugin.

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
from cases import provider
from over_ranks import first_failure, refused, shared_gpu
from record import OUT_OF_TIME, Found, NotRun, Step, worst
from training import DATA, GRADIENT, LOSS, MODEL, PACKED, SGD

from cp_plugin.testing.launch import RankError, run_ranks

RANKS, STEPS = 4, 2
PASSED = "self-check passed"
TWICE = 2.0
LOSSES = "losses"
"""What they are called beside the gradients."""
LEAST = 2e-4
"""Least limit of the losses in bfloat16: two losses may round to the same number by chance."""
HALF = {True: "", False: "--bf16"}
"""Whether it is a smoke test -> flags of its precision."""
TRAIN_S = 90.0
"""Seconds for one training; by estimate it takes 20. One rank goes first, and compiles for the others."""
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
    def of(self) -> tuple[str, ...]:
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


def main() -> None:
    with Step("megatron_training") as step:
        if find_spec("megatron") is None:
            step.not_run("Megatron's own training steps", "megatron-core is not installed: ci/gpu/wheels.sh brings it")
            return
        if reason := refused(step, RANKS):
            step.not_run("Megatron's own training steps", reason)
            return
        preload()
        for run in RUNS:
            step.attempt("Megatron's training", run.name, partial(right, partial(compared, run, step), step), run.of)


def preload() -> None:
    """Import Megatron once for all ranks of all training runs, without initialising CUDA: they are forked."""
    import sides

    sides.preload()
    import cp_plugin.megatron.models.gpt  # noqa: F401


def right(compare: Callable[[], Found], step: Step) -> Found:
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


def compared(run: Run, step: Step) -> Found:
    """Whether everything is right, and the error closest to its limit."""
    alone = run.model if run.alone is None else run.alone
    want = one_rank(f"{alone} {HALF[step.smoke]}", step)
    flags = f"{run.model} {HALF[step.smoke]} {run.flags} --context-parallel-size {run.cp}"
    got = train(RANKS, flags, step)
    ok, detail = judged(got, want, limits_of(want, None if step.smoke else one_rank(alone, step)))
    wrong = [f"rank {n}: no self-check" for n, ranks in enumerate(got[:1]) if not ranks.checked]
    wrong += [f"rank {n} sent {x.sent} bytes instead of {x.formula}" for n, x in enumerate(got) if x.sent != x.formula]
    return ok and not wrong, detail | ({"failure": "; ".join(wrong)} if wrong else {})


def judged(got: Sequence[Trained], want: Trained, limits: Mapping[str, float]) -> Found:
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
    found = {LOSSES: torch.tensor(errors).max().item()}  # NaN if one is; Python's own max may not say so
    found |= {name: ((got.gradients[name] - x).norm() / x.norm()).item() for name, x in want.gradients.items()}
    return {name: x if x == x else torch.inf for name, x in found.items()}


@cache
def one_rank(flags: str, step: Step) -> Trained:
    """Without context parallelism."""
    return train(1, flags, step)[0]


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


if __name__ == "__main__":
    main()
