"""Process groups: one per mesh axis, created with Megatron's, looked up by ranks, destroyed with Megatron's."""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from cp_plugin import ContextParallel, Options
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.usefixtures("adapter")


def _initialize(settings: Settings, **parallel: Any) -> Any:
    """Create the process groups as one rank of a Megatron run."""
    from megatron.core import parallel_state

    from cp_plugin.megatron.patches import hooks

    hooks.start(settings)
    parallel_state.initialize_model_parallel(**parallel)
    return parallel_state


def _describe(cp: ContextParallel) -> dict[str, Any]:
    ranks = {a: g and dist.get_process_group_ranks(g) for a, g in cp.mesh.groups.items()}
    return {"axes": cp.mesh.axes, "ranks": ranks}


def _describe_on_hosts(names: str, settings: Settings, **parallel: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rank i is on host ``names[i]``."""
    from cp_plugin.megatron import runtime

    socket.gethostname = lambda: names[dist.get_rank()]
    _initialize(settings, **parallel)
    cp = runtime.context_parallel()
    return _describe(cp), cp.why


BURST = Settings(provider="burst")
IN_PAIRS = Settings(provider="burst", options=Options(intra_size=2))
NESTED = {"inter": 2, "intra": 2}


@pytest.mark.parametrize(
    ("hosts", "settings", "tensor", "axes", "why", "warned"),
    [
        ("aaaabbbb", BURST, 2, NESTED, ["ranks 0-1 on a, 2-3 on b"] * 8, False),
        ("aabbccdd", BURST, 1, NESTED, ["ranks 0-1 on a, 2-3 on b"] * 4 + ["ranks 0-1 on c, 2-3 on d"] * 4, False),
        ("aabbcccc", BURST, 1, {"inter": 4, "intra": 1}, ["the hosts of the ranks are unknown"] * 8, True),
        ("aabbcccc", IN_PAIRS, 1, NESTED, [""] * 8, False),
        ("aaaa", Settings(provider="ulysses"), 1, {"head": 4}, [""] * 4, False),  # whatever its heads are
        ("aaaa", Settings(provider="usp"), 1, {"cp": 1, "head": 4}, [""] * 4, False),
    ],
)
def test_meshes_follow_the_hosts(
    hosts: str,
    settings: Settings,
    tensor: int,
    axes: dict[str, int],
    why: list[str],
    warned: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Four context-parallel ranks; with tensor parallelism, neighbours in a group are two ranks apart."""
    run = partial(_describe_on_hosts, hosts, settings, tensor_model_parallel_size=tensor, context_parallel_size=4)
    results = run_ranks(run, len(hosts), init_process_group=True)
    assert [described["axes"] for described, _ in results] == [axes] * len(hosts)
    assert all(part in " ".join(reasons) for part, (_, reasons) in zip(why, results, strict=True))
    if tensor == 2:
        sums = {"inter_sums": [2, 6], "intra_sums": [0, 2]}
        assert results[2][0]["ranks"] == {"inter": [2, 6], "intra": [0, 2], **sums}
    text = capfd.readouterr().out
    assert text.count("warning: the context-parallel groups are spread over the hosts in different ways") == warned
    if warned:
        assert "[0, 1, 2, 3]: ranks 0-1 on a, 2-3 on b; [4, 5, 6, 7]: ranks 0-3 on c" in text


def _again() -> list[dict[str, Any]]:
    from cp_plugin.megatron import runtime

    mpu = _initialize(Settings(provider="ring"), context_parallel_size=4)
    cp = runtime.context_parallel()
    assert runtime.context_parallel(dist.new_group()) is cp, "found by ranks, not by object"
    assert cp.mesh.groups["cp"] is not mpu.get_context_parallel_group(), "the cp group itself is left alone"
    assert cp.mesh.groups["cp"] in mpu._global_process_group_list, "Megatron sets its timeout"
    seen = [_describe(cp)]
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(context_parallel_size=2, order="tp-cp-ep-pp-dp")
    return [*seen, _describe(runtime.context_parallel())]


def test_groups_are_destroyed_and_recreated() -> None:
    for rank, (first, second) in enumerate(run_ranks(_again, 4, init_process_group=True)):
        assert first["ranks"] == {"cp": [0, 1, 2, 3]}
        assert second["ranks"] == {"cp": [rank // 2 * 2, rank // 2 * 2 + 1]}


def test_models_with_groups_of_their_own_are_refused() -> None:
    from cp_plugin.megatron.groups import options_from

    with pytest.raises(ValueError, match="does not support models whose modules have their own process groups"):
        options_from({"rank_offset": 2, "local_world_size": 2})


def test_nccl_options_have_their_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron.groups import options_from

    path = tmp_path / "nccl.yaml"
    common = {"nccl_communicator_config_path": str(path), "distributed_timeout_minutes": 7}
    for text, message in (
        ("[1]", "write the name of a group and its options below it"),
        ("cp: [", "is not valid YAML"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"{path}.*{message}"):
            options_from(common)
    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.load))  # JSON is YAML; PyYAML is optional
    path.write_text('{"cp_plugin_cp": {"max_ctas": 4}, "cp": {"max_ctas": 8}}')
    options = options_from({**common, "high_priority_stream_groups": ["cp_plugin_row"]})
    row = {"cp_plugin_row": {"is_high_priority_stream": True}}
    assert options.nccl == {"cp_plugin_cp": {"max_ctas": 4}, "cp": {"max_ctas": 8}} | row
    assert options.timeout == timedelta(minutes=7)


def test_streams_of_the_plugins_groups_have_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron import groups

    options = groups.GroupOptions(
        timeout=timedelta(minutes=7),
        nccl={"cp_plugin_kv": {"max_ctas": 4}, "cp_plugin_q": {"is_high_priority_stream": False}},
    )
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert groups._nccl_options("cp_plugin_cp", options) is None
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    cp, kv, q = (groups._nccl_options(f"cp_plugin_{name}", options) for name in ("cp", "kv", "q"))
    assert [o.is_high_priority_stream for o in (cp, kv, q)] == [True, True, False]
    assert kv.config.max_ctas == 4
