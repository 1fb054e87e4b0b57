"""Trials that are more than a plant in a rank. Each takes the fault and an empty folder, and returns how it ended.

Those that are to be resumed raise ``Wrong`` if the next start does not go on with an undisturbed run's losses."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trial
from faults import TIMEOUT, Fault
from planted import Plant
from trial import Ended

STEPS = 6


class Wrong(Exception):
    """What is not as expected."""


def base(fault: Fault) -> str:
    return f"--mock-data --train-iters {STEPS} --context-parallel-size {fault.ranks} --cp-provider ring {fault.flags}"


@functools.lru_cache
def undisturbed() -> dict[int, str]:
    """Iteration -> loss of a run on two ranks that nothing happens to."""
    ended = trial.train(base(Fault(name="", what="")))
    if ended.status or len(ended.losses) != STEPS:
        raise Wrong(f"the undisturbed run ended with {ended.status}: {ended.text[-2000:]}")
    return ended.losses


def run(fault: Fault, folder: Path) -> Ended:
    """Do what the fault says."""
    name, _, argument = fault.how.partition(":")
    return _HOW[name](fault, folder, argument)


def _plain(fault: Fault, folder: Path, _: str, **more) -> Ended:
    return trial.train(base(fault), ranks=fault.ranks, timeout=TIMEOUT, plants=fault.plants, **more)


def _saving(fault: Fault, folder: Path, _: str) -> Ended:
    return trial.train(
        f"{base(fault)} --ckpt-format torch --save {folder} --save-interval 1000",
        ranks=fault.ranks,
        timeout=TIMEOUT,
        plants=fault.plants,
    )


def save(folder: Path, style: str = "torch_dist") -> None:
    """An undisturbed run of four steps that saves after the second and the fourth."""
    flags = f"{base(Fault(name='', what=''))} --exit-interval 4 --ckpt-format {style} --save {folder} --save-interval 2"
    ended = trial.train(flags)
    if ended.status:
        raise Wrong(f"saving ended with {ended.status}: {ended.text[-2000:]}")


def load(folder: Path, style: str = "torch_dist", more: str = "") -> Ended:
    return trial.train(f"{base(Fault(name='', what=''))} --ckpt-format {style} --load {folder} {more}")


def resumed(folder: Path, style: str = "torch_dist") -> Ended:
    """The next start; Wrong if its losses are not those of the undisturbed run, or it starts anew."""
    ended = load(folder, style)
    if ended.status or STEPS not in ended.losses:
        raise Wrong(f"the next start ended with {ended.status}: {_last(ended.text)}")
    wrong = {i: loss for i, loss in ended.losses.items() if undisturbed()[i] != loss}
    if wrong:
        raise Wrong(f"the next start has other losses: {wrong}")
    if min(ended.losses) == 1:
        raise Wrong("the next start began anew")
    return ended


def _cut(fault: Fault, folder: Path, file: str) -> Ended:
    """Cut the file to half; with ``-`` before its name, remove it; with ``0``, fill it with zeros."""
    save(folder)
    how, name = (file[0], file[1:]) if file[0] in "-0" else ("", file)
    path = folder / "iter_0000004" / name
    if how == "-":
        path.unlink()
    elif how == "0":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        os.truncate(path, path.stat().st_size // 2)
    return load(folder)


def _cut_torch(fault: Fault, folder: Path, _: str) -> Ended:
    save(folder, "torch")
    for path in (folder / "iter_0000004").glob("mp_rank_*/*.pt"):
        os.truncate(path, path.stat().st_size // 2)
    return load(folder, "torch")


def _latest(fault: Fault, folder: Path, says: str) -> Ended:
    save(folder, "torch")
    (folder / "latest_checkpointed_iteration.txt").write_text(says)
    return resumed(folder, "torch") if fault.expect == "resumes" else load(folder, "torch")


def _small(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], check=True)


def _full(fault: Fault, folder: Path, style: str) -> Ended:
    _small(folder)
    try:
        return trial.train(
            f"{base(fault)} --ckpt-format {style or 'torch'} --save {folder} --save-interval 2", timeout=TIMEOUT
        )
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _logs_full(fault: Fault, folder: Path, _: str) -> Ended:
    _small(folder)
    (folder / "filler").write_bytes(bytes(36 << 10))
    try:
        return trial.train(f"{base(fault)} --tensorboard-dir {folder} --tensorboard-queue-size 1", timeout=TIMEOUT)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _unwritable(fault: Fault, folder: Path, _: str) -> Ended:
    (folder / "file").touch()
    return trial.train(f"{base(fault)} --ckpt-format torch --save {folder}/file/x --save-interval 2", timeout=TIMEOUT)


def _rank_flags(fault: Fault, folder: Path, _: str) -> Ended:
    return _plain(fault, folder, "", rank_flags=["", "--seq-length 64 --max-position-embeddings 64"])


def _on_rank_1(do: Callable[[], None]) -> Callable[[], None]:
    return lambda: do() if os.environ["RANK"] == "1" else None


def _plugin_version(fault: Fault, folder: Path, _: str) -> Ended:
    def other() -> None:
        from cp_plugin.megatron.startup import agreement

        agreement.__version__ = "9.9.9"

    return _plain(fault, folder, "", prepare=_on_rank_1(other))


def _megatron_version(fault: Fault, folder: Path, _: str) -> Ended:
    def other() -> None:
        from cp_plugin.megatron.startup import agreement

        agreement.megatron_version = lambda: "0.18.0"

    return _plain(fault, folder, "", prepare=_on_rank_1(other))


def _environment(fault: Fault, folder: Path, _: str) -> Ended:
    other = {"OMP_NUM_THREADS": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    return _plain(fault, folder, "", prepare=_on_rank_1(lambda: os.environ.update(other)))


def _world_size(fault: Fault, folder: Path, _: str) -> Ended:
    return _plain(fault, folder, "", prepare=_on_rank_1(lambda: os.environ.update(WORLD_SIZE="3")))


def _odd_world(fault: Fault, folder: Path, _: str) -> Ended:
    return trial.train(base(fault).replace("parallel-size 3", "parallel-size 2"), ranks=3, timeout=TIMEOUT)


def _cut_index(fault: Fault, folder: Path, _: str) -> Ended:
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=numpy.uint16)
    for i in range(50):
        builder.add_document(torch.arange(i, i + 20) % 60, [20])
    builder.finalize(f"{folder}/text.idx")
    os.truncate(folder / "text.idx", (folder / "text.idx").stat().st_size // 2)
    data = f"--data-path {folder}/text --split 100,0,0 --data-cache-path {folder}/cache"
    return trial.train(base(fault).replace("--mock-data", data), timeout=TIMEOUT)


def _kill_saving(fault: Fault, folder: Path, _: str) -> Ended:
    flags = f"{base(Fault(name='', what=''))} --ckpt-format torch_dist --save {folder} --save-interval 2"
    plants = [Plant(rank=1, at="saving:0.005", step=4, do="kill")]
    ended = trial.train(flags, timeout=TIMEOUT, plants=plants)
    resumed(folder)
    return ended


def _requeue(fault: Fault, folder: Path, _: str) -> Ended:
    ended = trial.train(
        f"{base(fault)} --ckpt-format torch --save {folder} --save-interval 1000 --exit-signal-handler",
        timeout=TIMEOUT,
        plants=[Plant(rank=1, at="forward", step=3, do="signal-launcher:SIGTERM")],
    )
    resumed(folder, "torch")
    return ended


def _link(fault: Fault, change: Callable[..., None]) -> Ended:
    """Nodes and links are those of ci/cluster; everything goes over them, the run's store too."""
    sys.path.append(str(Path(__file__).parents[1] / "cluster"))
    from network import Network, Topology

    def join() -> None:
        port = "29511"  # in a network namespace of its own, where nothing else listens
        os.environ["GLOO_SOCKET_IFNAME"] = network.enter(int(os.environ["RANK"]))
        os.environ.update(
            MASTER_ADDR=network.topology.address(0), MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False"
        )

    with Network(Topology(nodes=2, ranks_per_node=2, nic="node"), 1_000_000_000) as network:

        def meanwhile(_: int, mark: Path) -> None:
            deadline = time.monotonic() + 120
            while not mark.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            change(network)

        plants = [Plant(rank=3, at="forward", step=3, do="nothing")]
        flags = base(fault)
        if fault.expect == "ends":  # it is to be in training when the link goes
            flags = flags.replace(f"--train-iters {STEPS}", "--train-iters 1000")
        return trial.train(
            flags,
            ranks=4, timeout=TIMEOUT, plants=plants, prepare=join, meanwhile=meanwhile,
        )  # fmt: skip


def _torchrun(fault: Fault, folder: Path, _: str) -> Ended:
    return trial.torchrun(base(fault), timeout=TIMEOUT, plants=fault.plants)


def _restart(fault: Fault, folder: Path, _: str) -> Ended:
    flags = f"{base(fault)} --ckpt-format torch --save {folder} --load {folder} --save-interval 2"
    plants = [Plant(rank=1, at="forward", step=4, do="kill", once=str(folder / "killed"))]
    ended = trial.torchrun(flags, options="--standalone --max-restarts 2", timeout=TIMEOUT, plants=plants)
    if ended.status or ended.losses != undisturbed():
        raise Wrong(f"ended with {ended.status} and losses {ended.losses}; undisturbed: {undisturbed()}")
    return ended


def _one_port(fault: Fault, folder: Path, _: str) -> Ended:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        return trial.torchrun(base(fault), options=f"--master-addr 127.0.0.1 --master-port {port}", timeout=TIMEOUT)


_HOW: dict[str, Callable[[Fault, Path, str], Ended]] = {
    "plain": _plain,
    "saving": _saving,
    "cut": _cut,
    "cut_torch": _cut_torch,
    "latest": _latest,
    "full": _full,
    "logs_full": _logs_full,
    "unwritable": _unwritable,
    "rank_flags": _rank_flags,
    "plugin_version": _plugin_version,
    "megatron_version": _megatron_version,
    "environment": _environment,
    "world_size": _world_size,
    "odd_world": _odd_world,
    "cut_index": _cut_index,
    "kill_saving": _kill_saving,
    "requeue": _requeue,
    "link_cut": lambda fault, folder, _: _link(fault, lambda network: network.cut(2)),
    "link_slow": lambda fault, folder, _: _link(fault, lambda network: network.shape(10_000_000)),
    "torchrun": _torchrun,
    "restart": _restart,
    "one_port": _one_port,
}


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line or "cp_plugin:" in line]
    return lines[-1][:300] if lines else text[-300:]
