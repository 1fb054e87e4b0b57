"""Fits of rates and links, and ``cp-plugin calibrate`` on two forked ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cp_plugin.engine.comm import GroupMesh
from cp_plugin.planner.calibration import kernel_rates, link_rates
from cp_plugin.planner.calibration.kernel_rates import fit
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster, Link
from cp_plugin.planner.trace.program import Attention, Shape
from cp_plugin.testing.launch import run_ranks
from cp_plugin.tools.app import app

_HERE = torch.device("cpu")
_SIZES = kernel_rates.Sizes(
    head_dim=16, heads=(2,), tiles=((32, 32), (64, 64), (64, 256)), matrix=64, rows=(4, 64, 256)
)  # fmt: skip


@pytest.fixture(scope="module")
def quick():
    """Small tensors and short windows, also in forked ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_rates, "ON_CPU", _SIZES)
        patch.setattr(kernel_rates, "WINDOW_S", 0.01)
        patch.setattr(link_rates, "SECONDS", (0.0, 0.01, 0.03))
        yield


def calibrated(**hosts: tuple[str, str]) -> Cluster:
    return run_ranks(
        lambda: link_rates.calibrate("here", _HERE, [torch.float32], **hosts), 2, timeout=60, init_process_group=True
    )[0]


class _Clock:
    """In place of ``time`` in ``link_rates``: only messages take time, each what ``link`` needs for its bytes."""

    def __init__(self, link: Link) -> None:
        self._link, self._now = link, 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def timed(self, verb: str) -> Callable[..., Any]:
        post = getattr(GroupMesh, verb)

        def posted(mesh: GroupMesh, axis: str, tensors: Sequence[torch.Tensor]) -> Any:
            sent = sum(t.nbytes for t in tensors) // (2 if verb in ("all_to_all", "reduce_scatter") else 1)
            self._now += self._link.latency_s + sent / self._link.bytes_per_s
            return post(mesh, axis, tensors)

        return posted


def test_fit_recovers_known_figures():
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (12, 3)) * (1, 1e3, 1e9)
    true = np.array([1e-3, 1e-6, 1e-12])
    fitted = fit(work, work @ true)
    assert fitted.figures == pytest.approx(true) and fitted.error < 1e-9
    noisy = fit(work, work @ true * rng.normal(1, 0.03, 12))
    assert noisy.figures == pytest.approx(true, rel=0.2) and 0.01 < noisy.error < 0.05
    assert fit([(1, 1), (1, 2)], [1, 3]).figures[0] == 0, "a line with a negative intercept"
    with pytest.raises(ValueError, match="1 measurements cannot give 2 figures"):
        fit([(1, 1)], [1])
    with pytest.raises(ValueError, match="times must be positive"):
        fit([(1, 1), (1, 2)], [1, 0])


def test_kernel_block_is_recovered():
    """From times of a kernel that computes whole blocks of 32 queries and 512 keys."""
    true = hardware.Rate(flops_per_s=2e12, overhead_s=2e-5, row_s=1e-9)

    def made(event: Attention) -> float:
        return true.seconds(kernel_rates.kernel_time.flops(event, (32, 512)), rows=event.heads * event.rows)

    tiles = [(n, n, d) for n in (256, 512, 1024, 2048) for d in (0, n - 1)] + [(128, 1024, 1023)]
    events = [Attention("forward", (Shape(*t),), t[0], heads, 64, 64, "float32") for t in tiles for heads in (2, 8)]
    timed = [kernel_rates.Timed(a, made(a)) for a in events]
    kernel = kernel_rates.as_kernel(timed, timed, "made up")
    assert kernel.block == (32, 512)
    assert kernel.forward.flops_per_s == pytest.approx(2e12) and kernel.forward.row_s == pytest.approx(1e-9)
    assert kernel.forward.overhead_s == pytest.approx(2e-5)


@pytest.mark.parametrize("hosts", [("one", "one"), ("one", "two")])
def test_calibrate_finds_the_links_that_its_messages_had(quick, hosts, monkeypatch):
    """Bytes, units, rounds and ranks between a message and the profile, independent of what else the machine does."""
    true = Link(latency_s=2e-3, bytes_per_s=3e7)
    clock = _Clock(true)
    monkeypatch.setattr(link_rates, "time", clock)
    for verb in ("shift", "all_to_all", "reduce_scatter", "all_gather"):
        monkeypatch.setattr(GroupMesh, verb, clock.timed(verb))
    profile = calibrated(hosts=hosts)
    verbs = profile.inter.verbs
    assert set(verbs) == (set() if hosts == ("one", "one") else {"all_to_all", "reduce_scatter", "all_gather"})
    for link in (profile.intra, profile.inter, *verbs.values()):
        assert (link.latency_s, link.bytes_per_s) == pytest.approx((true.latency_s, true.bytes_per_s), rel=1e-6)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("here.toml", "--ranks", "1"), "--ranks 1: a single rank has no links to measure"),
        (("",), "profiles are .toml files; write profile.toml"),
        (("here.json",), "here.json: profiles are .toml files; write here.toml"),
        (("here.toml", "--device", "cuda"), "torch sees no CUDA device"),
    ],
)
def test_bad_commands_are_refused_before_measuring(words, part, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = CliRunner().invoke(app, ["calibrate", *words])
    assert done.exit_code == 2 and part in done.output, done.output
    assert list(tmp_path.iterdir()) == []


def test_bad_launches_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path / "here.toml"), "--ranks", "2"])
    assert done.exit_code == 2 and "--ranks 2: torchrun has already started 4 ranks; leave --ranks out" in done.output
    with pytest.raises(ValueError, match="3 ranks on 2 hosts are not spread evenly"):
        link_rates.Measured(("a", "a", "b"), _HERE, lambda text: None)


def test_the_command_writes_what_it_measured(quick, tmp_path: Path):
    """By the real clock, on two ranks."""
    out = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["calibrate", str(out), "--ranks", "2", "--dtype", "float32", "--device", "cpu"])
    assert done.exit_code == 0 and f"wrote {out}" in done.output, done.output
    profile = hardware.cluster(str(out))
    assert (profile.name, profile.transport, profile.per_node, profile.nics) == ("mine", "gloo", 2, 2)
    assert profile.inter == profile.intra and profile.device.shared_by >= 1 and "2 ranks" in profile.source
    device, kernel = profile.device, profile.device.attention["float32"]
    rates = (kernel.forward.flops_per_s, kernel.backward.flops_per_s, device.gemm_flops_per_s["float32"])
    assert all(1e6 < rate < float("inf") for rate in (*rates, device.memory_bytes_per_s, profile.intra.bytes_per_s))
