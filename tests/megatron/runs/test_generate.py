"""`cp-plugin generate`: the same text from one rank and from several, and messages without tracebacks."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import NIGHT, nightly, one_case
from training import train
from warm import Forked, run_forked

from cp_plugin.engine.inference.request import Sampler, Sampling
from cp_plugin.testing.launch import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("adapter")

MODELS = {
    "window": "--window-size 20,0 --cp-provider striped --ckpt-format torch_dist",
    "hybrid": "--cp-linear-attention gla --cp-layer-pattern LN --ckpt-format torch",
}
"""Each in another of Megatron's formats."""


Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``checkpoints(model)``: saved by two ranks when it is first asked for."""

    @functools.cache
    def saved(model: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        words = f"{MODELS[model]} --context-parallel-size 2 --vocab-size 300 --save {folder} --save-interval 2"
        train(2, words, steps=2)
        return folder

    return saved


def generate(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a fork of this process."""
    from cp_plugin.tools.app import app

    return run_forked(lambda: app(["generate", *words]))


def texts(*words: str) -> dict[str, Any]:
    done = generate("--bytes", "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@one_case
@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_that_of_one_rank(model: str, checkpoints: Checkpoints) -> None:
    new = 256 if NIGHT else 32
    common = ("--load", str(checkpoints(model)), "--prompt", "def main", "--new-tokens", str(new), "--ignore-eod")
    one = texts(*common)
    assert len(one["tokens"][0]) == len("def main") + new and len(set(one["tokens"][0])) > 10
    provider = () if model == "hybrid" else ("--cp-provider", "attention2d")
    ranks = 4 if NIGHT else 2
    several = texts(*common, "--ranks", str(ranks), "--chunk", "4", *provider)
    assert several["tokens"] == one["tokens"]
    assert len(set(several["cache_bytes"])) == 1
    if model == "window":
        whole = one["cache_bytes"][0]
        assert abs(ranks * several["cache_bytes"][0] - whole) <= ranks * 2 * whole / (8 + new)


@nightly
def test_several_prompts_drawn_with_tensor_parallel_ranks(checkpoints: Checkpoints) -> None:
    common = ("--load", str(checkpoints("window")), "--prompt", "abc", "--prompt", "import json", "--new-tokens", "12")
    drawn = (*common, "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--sample-seed", "3")
    one = texts(*drawn)
    other = texts(*drawn, "--ranks", "4", "--tensor-model-parallel-size", "2")
    assert one["tokens"] == other["tokens"] != texts(*drawn[:-1], "4")["tokens"]
    assert [text[:3] for text in one["texts"]] == ["abc", "imp"]


def test_text_streams_to_stdout_alone_and_figures_to_stderr(checkpoints: Checkpoints) -> None:
    done = generate("--load", str(checkpoints("window")), "--prompt", "abc", "--bytes", "--new-tokens", "8")
    assert done.returncode == 0 and done.stdout.startswith("abc") and "Megatron" not in done.stdout
    measured = " ".join(done.stderr.split())
    assert all(part in measured for part in ("prefill: 3 tokens in", "tokens/s; cache: ", "on each of 1 ranks"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--load /nowhere --prompt a", "--load /nowhere: no such folder"),
        ("--load EMPTY --prompt a", "names no checkpoint in it: choose one with --ckpt-step"),
        ("--load SAVED --prompt a --new-tokens 0", "--new-tokens 0: write 1 or more"),
        ("--load SAVED --prompt a --ckpt-step 9", "--ckpt-step 9"),
        ("--load SAVED --prompt a", "NullTokenizer cannot encode it"),
        ("--load SAVED --prompt 4711", r"token ids [4711] are not in the model's vocabulary"),
        ("--load SAVED --prompt a --bytes --ranks 2 --pipeline-model-parallel-size 2 --context-parallel-size 1",
         "--pipeline-model-parallel-size 2: use 1"),
        ("--load SAVED --prompt a --bytes --ranks 2 --cp-provider nix", "--cp-provider nix: choose one of"),
        ("--load SAVED --prompt a --bytes --cp-device gpu", "--cp-device gpu"),
        ("--load SAVED --prompt a --bytes --sequence-parallel --ranks 2 --tensor-model-parallel-size 2",
         "without --sequence-parallel"),
    ],
)  # fmt: skip
def test_errors_come_without_a_traceback(words: str, says: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    done = generate(*words.replace("SAVED", str(checkpoints("window"))).replace("EMPTY", str(tmp_path)).split())
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_ranks_that_disagree_on_the_prompt_are_named(checkpoints: Checkpoints) -> None:
    """Under torchrun every rank has a command line of its own."""

    def rank() -> None:
        from cp_plugin.engine.inference.request import Request
        from cp_plugin.tools import generate as command

        prompt = "abc" if os.environ["RANK"] == "0" else "abd"
        command._preload([])
        request = Request(prompts=(prompt,), new_tokens=4, as_bytes=True)
        folder = checkpoints("window")
        command._rank(request, (folder, None), ["--load", str(folder)], as_json=False)

    with pytest.raises(RankError) as caught:
        run_ranks(rank, 2, timeout=120)
    (said,) = caught.value.refusals
    assert "rank 1 got a different --prompt" in said


def test_an_interrupt_ends_all_ranks_and_loses_no_text(checkpoints: Checkpoints) -> None:
    words = f"--load {checkpoints('window')} --prompt abc --bytes --new-tokens 100000 --ranks 2 --ignore-eod"
    with Forked([sys.executable, "-m", "cp_plugin.generate", *words.split()]) as process:
        assert process.stdout.read(3) == "abc"
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 130 and "interrupted; 2 ranks stopped" in said
    assert len(said.partition("interrupted")[0]) > 0


def test_sampling() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1)

    def share(sampling: Sampling) -> list[float]:
        sampler = Sampler(sampling)
        drawn = sampler.choose(logits.expand(4000, -1))
        return (drawn.bincount(minlength=4) / 4000).tolist()

    assert share(Sampling()) == [1, 0, 0, 0]
    assert share(Sampling(temperature=1.0)) == pytest.approx(logits.exp()[0].tolist(), abs=0.03)
    two = (logits[0, :2].exp() / logits[0, :2].exp().sum()).tolist()
    assert share(Sampling(temperature=1.0, top_k=2)) == pytest.approx([*two, 0, 0], abs=0.03)
    assert share(Sampling(temperature=1.0, top_p=0.7)) == pytest.approx([*two, 0, 0], abs=0.03)
    assert share(Sampling(temperature=1.0, top_p=0.6)) == [1, 0, 0, 0]
    for wrong in ({"temperature": -1}, {"temperature": 1, "top_p": 0.0}, {"top_k": -1}, {"top_k": 2}):
        with pytest.raises(ValueError, match="--"):
            Sampling(**wrong)
