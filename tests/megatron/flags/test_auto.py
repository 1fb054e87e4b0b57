"""``--cp-provider auto``: the choice, its constraints, and the equivalent flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import one_case
from training import assert_same_bits, train

from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.flags.args import Settings, settings_from
from cp_plugin.planner.machine import hardware

pytestmark = pytest.mark.usefixtures("adapter")

AUTO = "--context-parallel-size 4 --cp-provider auto"
TWO = "--context-parallel-size 2 --cp-provider auto"
HYBRID = "--cp-linear-attention gla --cp-layer-pattern LN"


def told(text: str, what: str) -> str:
    """The rest of rank 0's only line with this prefix."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"cp_plugin: auto: {what}")]
    return line.removeprefix(f"cp_plugin: auto: {what}")


def test_printed_flags_reproduce_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    by_planner = train(2, f"{TWO} --ckpt-format torch --save {tmp_path} --save-interval 2", steps=2)
    text = capfd.readouterr().out
    assert told(text, "planned for ") == "cpu with 2 per node, inferred from cpu and 2 ranks per node"
    flags = told(text, "equivalent flags without the planner: ")
    assert flags.startswith("--cp-provider ")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and line.count("|") == 3]
    assert rows.count("auto") == 1, "the audit has it"
    (saved,) = tmp_path.glob("iter_*/mp_rank_00/*.pt")
    settings = torch.load(saved, weights_only=False)["args"].context_parallel_plugin
    assert f"--cp-provider {settings['--cp-provider']} --cp-layout {settings['--cp-layout']}" in flags
    by_hand = train(2, f"--context-parallel-size 2 {flags}", steps=2)
    assert "cp_plugin: auto" not in capfd.readouterr().out
    assert_same_bits(by_planner, by_hand)
    assert all(one.sent == other.sent == one.formula for one, other in zip(by_planner, by_hand, strict=True))


@pytest.fixture
def decide_on_gpus(
    validated: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[argparse.Namespace, Settings]]:
    """``decide_on_gpus(flags)``: arguments and settings once ``auto`` has decided for a DGX H100."""
    from cp_plugin.megatron.planned import auto

    def decided(flags: str = "", **named: bool) -> tuple[argparse.Namespace, Settings]:
        args = validated(f"--context-parallel-size 4 --cp-provider ring --bf16 {flags}")
        args.cp_provider, args.cp_cluster, args.transformer_impl = "auto", "dgx-h100", "transformer_engine"
        args.cp_gradient_dtype = None
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(auto.cpu, "active", lambda: False)
            return args, auto.decide(args, settings_from(args), **named)

    return decided


@pytest.mark.parametrize(
    ("flags", "ties", "engine", "left"),
    [
        ("", True, True, True),
        ("", False, True, False),  # a gain beyond the typical error
        ("", True, False, False),  # no Transformer Engine
        ("--dataloader-inter-document-masking", True, True, False),
        ("--cp-recompute-attention --recompute-granularity selective", True, True, False),
    ],
)
def test_stock_megatron_without_a_significant_gain(
    decide_on_gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    ties: bool,
    engine: bool,
    left: bool,
) -> None:
    """If stock Megatron would suffice but cannot be chosen, the message says so."""
    from cp_plugin.megatron.planned import auto
    from cp_plugin.planner.search import Plan

    monkeypatch.setattr(Plan, "beating", lambda plan, stock: None if ties else plan.best)
    monkeypatch.setattr(auto.importlib.util, "find_spec", lambda name: engine or None)
    args, settings = decide_on_gpus(flags, may_leave=True)
    text = capsys.readouterr().out
    by_hand = told(text, "equivalent flags without the planner: ")
    assert settings.active == (not left) and settings.planned and args.cp_cluster is None
    if left:
        assert by_hand == f"--cp-provider upstream --cp-comm-type {args.cp_comm_type[0]}"
        assert args.cp_provider == "upstream" and "nothing is replaced" in settings.planned[0]
        assert "typical error" in text
    else:
        assert args.cp_provider in providers.names() and args.cp_comm_type == ["p2p"]
        assert ("would do just as well" in text) == ties


def test_stock_megatron_is_not_patched(
    validated: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import patching
    from cp_plugin.megatron.planned import auto

    before = patching.installed()
    monkeypatch.setattr(auto, "decide", lambda args, settings, may_leave: Settings(planned=("stock",)))
    validated(AUTO)
    assert not runtime.settings().active and patching.installed() == before


def test_plans_for_documents_of_the_dataset(
    validated: Callable[..., argparse.Namespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slow links favour ``needed`` on the documents layout; mock data has no known documents."""
    from cp_plugin.megatron import dataset, runtime
    from cp_plugin.megatron.planned.sizes import pack_of

    dataset.write(str(tmp_path / "chat"), ([1] * n for n in (40, 300, 700, 90, 2000, 150)), 127)
    dataset.write(str(tmp_path / "long"), ([1] * n for n in (30_000, 20_000)), 127)
    data = f"--data-path 0.7 {tmp_path}/chat 0.3 {tmp_path}/long --split 100,0,0"
    known = hardware.cluster("h100-1-per-node")
    slow = known.inter.model_copy(update={"bytes_per_s": 1e8})
    hardware.save(known.model_copy(update={"inter": slow, "collectives": {}}), tmp_path / "slow.toml")
    long = f"--seq-length 8192 --max-position-embeddings 8192 --cp-cluster {tmp_path}/slow.toml --bf16"
    flags = f"{AUTO} {long} --dataloader-inter-document-masking"
    args = validated(f"{flags} {data}", without="--mock-data")
    settings = runtime.settings()
    assert (settings.provider, settings.options.layout) == ("needed", "documents")
    assert f"drawn from {tmp_path}/chat.idx" in told(capsys.readouterr().out, "planned for packs such as one of ")
    assert "typical error" in settings.planned[0], "how sure that is"
    pack = pack_of(args, 2 * 8192)
    assert pack is not None and sum(pack.lengths) == 2 * 8192 and pack == pack_of(args, 2 * 8192), "on every rank"
    assert set(pack.lengths[:-1]) <= {40, 300, 700, 90, 2000, 150}

    validated(f"{flags} {data} --cp-layout zigzag", without="--mock-data")
    assert runtime.settings().options.layout == "zigzag", "as it was asked for"
    validated(flags)
    assert runtime.settings().options.layout != "documents"
    assert told(capsys.readouterr().out, "planned for packs as single sequences")
    args.dataloader_inter_document_masking = False
    assert pack_of(args, 8192) is None


KEPT: dict[str, dict[str, object]] = {
    "--cp-grid 2x2": {"provider": "attention2d", "grid": (2, 2)},
    "--cp-layout contiguous": {"layout": "contiguous"},
    "--cp-layout zigzag --cp-head-parallel 2": {"layout": "zigzag", "head_parallel": 2},
    "--cp-backward q --cp-intra-size 2": {"provider": "burst", "backward": "q", "intra_size": 2},
    "--cp-head-groups 2 --cp-cluster a100-4-per-node": {"head_groups": 2},
    "--cp-backend reference": {"backend": "reference"},
    "--bf16 --cp-fp8 comm": {"fp8": "comm"},
    "--bf16 --cp-gradient-dtype model --cp-intra-size 2": {"gradient_dtype": "model", "intra_size": 2},
    "--seq-length 60": {"layout": "contiguous"},  # no zigzag: not twice as many chunks as ranks
    "--use-torch-fsdp2 --cp-intra-size 2": {"layout": "zigzag"},
    f"{HYBRID} --cp-layout zigzag": {"layout": "zigzag"},
}


@one_case
@pytest.mark.parametrize("flags", KEPT)
def test_keeps_given_options(
    validated: Callable[..., argparse.Namespace], flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_plugin.megatron import runtime

    if "fsdp" in flags:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # required by Megatron
    validated(f"{AUTO} {flags}", without="--seq-length 64" if "--seq-length" in flags else "")
    settings = runtime.settings()
    assert settings.planned and settings.provider in providers.names()
    for name, value in KEPT[flags].items():
        assert (settings.provider if name == "provider" else getattr(settings.options, name)) == value


def test_auto_may_choose_a_provider_without_sums(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag permits lower precision; ``ulysses``, which has no sums, remains a candidate."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.planned import auto as planned

    narrow = "--cp-gradient-dtype model"
    auto = f"{AUTO} --bf16 --cp-cluster h100-1-per-node {narrow}"
    with monkeypatch.context() as patch:
        ulysses = lambda plan, *_: next(p for p in plan.methods if p.candidate.name == "ulysses")  # noqa: E731
        patch.setattr(planned, "_best", ulysses)
        args = validated(f"{auto} --num-query-groups 4")
    assert runtime.settings().provider == "ulysses" and args.cp_gradient_dtype is None
    assert "--cp-gradient-dtype" not in told(capsys.readouterr().out, "equivalent flags without the planner: ")
    validated(f"{auto} --cp-head-groups 1")
    assert runtime.settings().options.gradient_dtype == "model"
    assert narrow in told(capsys.readouterr().out, "equivalent flags without the planner: ")


def test_nothing_fits_the_memory(validated: Callable[..., argparse.Namespace], tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    known = hardware.cluster("cpu")
    device = known.device.model_copy(update={"memory_bytes": 1e9})
    hardware.save(known.model_copy(update={"device": device}), path)
    with pytest.raises(ValueError, match=r"--cp-provider auto: nothing fits: .* needs at least .*; cpu has 1 GB"):
        validated(f"{AUTO} --cp-cluster {path}")


def test_inferred_clusters() -> None:
    h100, packaged = "NVIDIA H100 80GB HBM3", hardware.cluster("dgx-h100")

    def infer(gpu: str, per_node: int, ranks: int) -> hardware.Inferred:
        return hardware.cluster_of(gpu, per_node, ranks, "--cp-cluster")

    assert infer(h100, 8, 64) == (packaged, f"dgx-h100, inferred from {h100} and 8 ranks per node")
    one_node = infer(h100, 4, 4).cluster
    assert (one_node.per_node, one_node.intra, one_node.device) == (4, packaged.intra, packaged.device)
    assert infer("cpu", 3, 6).cluster.per_node == 3
    for gpu, per_node, message in (
        ("NVIDIA GeForce RTX 4090", 8, r"no profile for the GPU 'NVIDIA GeForce RTX 4090' \(.*--cp-cluster with one"),
        (h100, 4, r"4 ranks per node: the network is unknown \(dgx-h100 has 8 per node, h100-1"),
        ("NVIDIA A100-SXM4-40GB", 8, "no packaged cluster has these GPUs"),
    ):
        with pytest.raises(ValueError, match=message):
            infer(gpu, per_node, 64)
    assert set(hardware.GPUS.values()) <= set(hardware.devices())
    assert hardware.local_ranks({"LOCAL_WORLD_SIZE": "4"}, 8, 64) == 4
    assert [hardware.local_ranks({}, seen, ranks) for seen, ranks in ((8, 64), (8, 2), (0, 2))] == [8, 2, 1]
