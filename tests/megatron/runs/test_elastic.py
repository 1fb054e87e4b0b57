"""Checkpoints: resumed with other ranks, provider and grid as if never interrupted; differences are announced.

ring on 4 ranks --2--> attention2d, grid 2x2 --4--> attention2d, grid 1x4 --6--> ulysses on 2 ranks --> step 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from nightly import nightly
from state_space_kernels import STATES
from training import MODEL, SGD, train

from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version

pytestmark = pytest.mark.usefixtures("adapter")

STEPS = 8
ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 0.001")
COMMON = "--make-vocab-size-divisible-by 64 --ckpt-format torch_dist --override-opt-param-scheduler"
RING = "--context-parallel-size 4 --cp-provider ring"
GRID = "--context-parallel-size 4 --cp-provider attention2d --cp-grid"
GLA = "--cp-linear-attention gla --cp-layer-pattern LN"
RELAY = (
    (4, f"{GRID} 2x2", 0, 2, "--cp-provider attention2d; it was saved with ring, --cp-grid 2x2; it was saved without"),
    (4, f"{GRID} 1x4", 1, 4, "--cp-grid 1x4; it was saved with 2x2"),
    (2, "--context-parallel-size 2 --cp-provider ulysses", 2, 6, "--context-parallel-size 2; it was saved with 4"),
    (4, RING, 0, 6, ""),
    (1, "", 0, 6, "--cp-provider upstream; it was saved with ring"),
)
"""Ranks, flags, folder, iteration to resume from, announced differences."""
CLOSE = 1e-6
"""Relative: float32 sums in another order."""


def announced(capfd: pytest.CaptureFixture[str]) -> set[str]:
    lines = [line for line in capfd.readouterr().out.splitlines() if "cp_plugin: resumes" in line]
    assert len(set(lines)) == len(lines), "once each"
    return {line.partition("cp_plugin: resumes with ")[2] for line in lines}


@pytest.mark.versions
@nightly
def test_a_training_is_handed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = f"{COMMON} --save-interval 2 --save {tmp_path}"
    undisturbed = train(4, f"{RING} {files}/0", steps=STEPS, training=ADAM)[0].losses
    assert len(undisturbed) == STEPS and not announced(capfd)
    for number, (ranks, flags, folder, done, said) in enumerate(RELAY, 1):
        words = f"{flags} {files}/{number} --load {tmp_path}/{folder} --ckpt-step {done}"
        losses = train(ranks, words, steps=STEPS, training=ADAM)[0].losses
        assert len(losses) == STEPS - done, "it went on, and did not begin anew"
        errors = [abs(a / b - 1) for a, b in zip(losses, undisturbed[done:], strict=True)]
        assert max(errors) <= CLOSE, (flags, errors)
        lines = announced(capfd)
        assert lines >= set(filter(None, said.split(", "))) and bool(lines) == bool(said), lines
    with pytest.raises(Exception, match=f"saved with softmax attention in all layers, but this run has {GLA}"):
        train(2, f"{GLA} --context-parallel-size 2 {COMMON} --load {tmp_path}/0", steps=STEPS + 1, training=ADAM)


MEGATRON_FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"


@nightly
@pytest.mark.parametrize(
    ("ranks", "parallel", "without"),
    [
        (1, "", ""),
        # torch's Adam has no state for parameters without a shard on this rank, for which Megatron's saving waits
        (2, "--context-parallel-size 2 --cp-provider ring", "optim"),
    ],
)
def test_megatron_fsdp_is_resumed(ranks: int, parallel: str, without: str, tmp_path: Path) -> None:
    """Bitwise, in its own format without ``metadata.json``; only one step without the optimizer."""
    pytest.importorskip("einops")
    model = MODEL.replace("--swiglu ", "")  # Megatron splits its weights in bfloat16 only
    flags = f"{parallel} {MEGATRON_FSDP}"

    def run(more: str) -> list[float]:
        return train(ranks, f"{flags} {more}", steps=4, training=ADAM, model=model)[0].losses

    undisturbed = run(f"--save {tmp_path} --save-interval 2" + (without and f" --no-save-{without}"))
    load = f"--load {tmp_path}" + (without and f" --no-load-{without}")
    resumed = run(f"{load} --ckpt-step 2")
    assert len(resumed) == 2 and resumed[0] == undisturbed[2]
    assert without or resumed == undisturbed[2:]


LAYERS = "MG*-" if version_tuple(megatron_version()) >= (0, 19) else "M*-"
OTHERS = {
    f"--num-layers 4 --cp-linear-attention gla --cp-layer-pattern LLLN {COMMON}": (
        "--context-parallel-size 4",
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2 --pipeline-model-parallel-size 2",
    ),
    f"--hybrid-layer-pattern {LAYERS}/*- {STATES} --seq-length 32 --calculate-per-token-loss --cp-provider striped "
    f"{COMMON}": ("--context-parallel-size 4",),
}
"""Models with linear or state-space layers -> the four ranks on which they are resumed."""


@nightly
@pytest.mark.parametrize("flags", OTHERS, ids=["gla", "hybrid"])
def test_states_are_resumed_on_other_ranks(flags: str, tmp_path: Path) -> None:
    run = {"steps": 4, "training": ADAM}
    whole = train(2, f"{flags} --context-parallel-size 2 --save {tmp_path} --save-interval 2", **run)[0].losses
    for parallel in OTHERS[flags]:
        rest = train(4, f"{flags} {parallel} --load {tmp_path} --ckpt-step 2", **run)[-1].losses
        assert rest == pytest.approx(whole[2:], rel=1e-5), parallel


def test_checkpoint_of_linear_layers_is_refused_for_softmax_layers(tmp_path: Path) -> None:
    basic = "--cp-linear-attention basic --context-parallel-size 2"
    train(2, f"{basic} --make-vocab-size-divisible-by 64 --ckpt-format torch --save {tmp_path} --save-interval 1")
    with pytest.raises(Exception, match="saved with --cp-linear-attention basic --cp-layer-pattern L, but this run"):
        train(1, f"--make-vocab-size-divisible-by 64 --ckpt-format torch --load {tmp_path}", steps=2)


def test_models_and_differences() -> None:
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
