"""Checkpoints say how they were saved: resumed otherwise, training goes on as if never interrupted, and says so."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from harness import SGD, train
from nightly import slow

pytestmark = pytest.mark.usefixtures("adapter")

ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 0.001")
VOCABULARY = "--make-vocab-size-divisible-by 64"
CLOSE = 1e-5


@slow
def test_resumed_under_another_provider_layout_and_size(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    striped = "--context-parallel-size 2 --cp-provider striped"
    grid = "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2"
    save = f"--ckpt-format torch_dist --save {tmp_path} --save-interval 2"
    load = f"--ckpt-format torch_dist --load {tmp_path} --ckpt-step 2 --override-opt-param-scheduler"
    unbroken = train(2, f"{striped} {VOCABULARY} {save}", steps=4, training=ADAM)[0].losses
    assert not _announced(capfd)
    resumed = train(4, f"{grid} {VOCABULARY} {load}", steps=4, training=ADAM)[0].losses
    assert len(resumed) == 2
    assert max(abs(a / b - 1) for a, b in zip(resumed, unbroken[2:], strict=True)) <= CLOSE
    assert _announced(capfd) == {
        "--cp-provider attention2d; it was saved with striped",
        "--context-parallel-size 4; it was saved with 2",
        "--cp-layout zigzag; it was saved with striped",
        "--cp-grid 2x2; it was saved without",
        "--cp-head-groups 1; it was saved without",
    }
    train(2, f"{striped} {VOCABULARY} {load}", steps=3, training=ADAM)
    assert not _announced(capfd), "nothing differs"
    train(1, f"{VOCABULARY} {load}", steps=3, training=ADAM)
    assert "--cp-provider upstream; it was saved with striped" in _announced(capfd)
    gla = "--cp-linear-attention gla --cp-layer-pattern LN"
    with pytest.raises(Exception, match=f"saved with softmax attention in all layers, and this run has {gla}"):
        train(2, f"{gla} --context-parallel-size 2 {VOCABULARY} {load}", steps=3, training=ADAM)


def test_a_checkpoint_of_linear_layers_is_not_one_of_softmax_layers(tmp_path: Path) -> None:
    save = f"--ckpt-format torch --save {tmp_path} --save-interval 1"
    basic = "--cp-linear-attention basic --context-parallel-size 2"
    train(2, f"{basic} {VOCABULARY} {save}", training=ADAM)
    with pytest.raises(
        Exception, match="saved with --cp-linear-attention basic --cp-layer-pattern L, and this run has"
    ):
        train(1, f"{VOCABULARY} --ckpt-format torch --load {tmp_path}", steps=2, training=ADAM)


def _announced(capfd: pytest.CaptureFixture[str]) -> set[str]:
    lines = [line for line in capfd.readouterr().out.splitlines() if "cp_plugin: resumes" in line]
    assert len(set(lines)) == len(lines), "once each"
    return {line.partition("cp_plugin: resumes with ")[2] for line in lines}


def test_models_and_differences(adapter: None) -> None:
    from cp_plugin.megatron.startup.checkpoint import differences, other_model, saved

    def linear(kind: str, pattern: str) -> dict[str, str]:
        return {"--cp-linear-attention": kind, "--cp-layer-pattern": pattern}

    assert other_model(linear("gla", "LLLN"), linear("gla", "LLLNLLLN"), 8) is None, "the same layers"
    assert other_model(linear("gla", "LLLN"), linear("gla", "LLLNLLLL"), 8)
    assert other_model(linear("gla", "L"), linear("basic", "L"), 2)
    assert other_model({}, linear("basic", "L"), 2)
    assert other_model({"--cp-provider": "ring"}, {"--cp-provider": "upstream"}, 2) is None
    assert differences({"--a": "1", "--b": "2"}, {"--a": "1", "--c": "3"}) == [
        "resumes with --b 2; it was saved without",
        "resumes without --c; it was saved with 3",
    ]
    stock = saved(argparse.Namespace(context_parallel_size=4))
    assert stock == {"--cp-provider": "upstream", "--context-parallel-size": "4"}
