"""Run a fault: the training with it and, if it must be resumable, the next start.

``Wrong`` is raised if the next start does not continue with the losses of an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trial
from faults import TIMEOUT, Fault
from rank_faults import Plant
from trial import Ended

STEPS = 6
UNDISTURBED = Fault(name="", what="")


class Wrong(Exception):
    """An outcome that is not the expected one."""


def base(fault: Fault) -> str:
    return f"--mock-data --train-iters {STEPS} --context-parallel-size {fault.ranks} --cp-provider ring {fault.flags}"


@functools.lru_cache
def undisturbed() -> dict[int, str]:
    """Iteration -> loss of a two-rank run without a fault."""
    ended = trial.train(base(UNDISTURBED))
    if ended.status or len(ended.losses) != STEPS:
        raise Wrong(f"the undisturbed run ended with {ended.status}: {ended.text[-2000:]}")
    return ended.losses


def run(fault: Fault, folder: Path) -> Ended:
    """Run the fault in an empty folder."""
    if fault.how:
        return _HOW[fault.how](fault, folder)
    with _room(folder, fault.room):
        flags = base(fault).format(folder=folder)
        if fault.format:
            flags += f" --ckpt-format {fault.format} --save {folder} --save-interval {fault.save_every}"
        if fault.torchrun:
            return trial.torchrun(flags, options=fault.torchrun, timeout=TIMEOUT, plants=fault.plants)
        ended = trial.train(
            flags,
            ranks=fault.ranks,
            timeout=TIMEOUT,
            plants=fault.plants,
            flags_of_rank_1=fault.flags_of_rank_1,
        )
        if fault.expect == "resumes":
            again = f"{base(UNDISTURBED)} --ckpt-format {fault.format} --load {folder}"
            _must_resume(trial.train(again))
        return ended


def _must_resume(ended: Ended) -> None:
    """Raise Wrong if a start's losses differ from those of the undisturbed run, or it began from scratch."""
    if ended.status or STEPS not in ended.losses:
        lines = [line for line in ended.text.splitlines() if "Error" in line or "cp_plugin:" in line]
        said = lines[-1][:300] if lines else ended.text[-300:]
        raise Wrong(f"the next start ended with {ended.status}: {said}")
    wrong = {i: loss for i, loss in ended.losses.items() if undisturbed()[i] != loss}
    if wrong:
        raise Wrong(f"the next start has different losses: {wrong}")
    if min(ended.losses) == 1:
        raise Wrong("the next start began from scratch")


@contextlib.contextmanager
def _room(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a file system of that size on the folder; 0: leave it as it is."""
    if not kilobytes:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _link(fault: Fault, folder: Path, change: Callable[..., None]) -> Ended:
    """Train on the virtual nodes of ci/cluster; all traffic, including the store's, uses their links."""
    from network import Network, Topology

    def join() -> None:
        port = "29511"  # free: the network namespace is new
        os.environ["GLOO_SOCKET_IFNAME"] = network.enter(int(os.environ["RANK"]))
        os.environ.update(
            MASTER_ADDR=network.topology.address(0), MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False"
        )

    with Network(Topology(nodes=2, ranks_per_node=2, nic="node"), 1_000_000_000) as network:

        def meanwhile(mark: Path) -> None:
            deadline = time.monotonic() + 120
            while not mark.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            change(network)

        plants = [Plant(rank=3, at="forward", step=3, do="nothing")]
        flags = base(fault)
        if fault.expect == "ends":  # still training when the link goes down
            flags = flags.replace(f"--train-iters {STEPS}", "--train-iters 1000")
        return trial.train(flags, ranks=4, timeout=TIMEOUT, plants=plants, prepare=join, meanwhile=meanwhile)


def _restart(fault: Fault, folder: Path) -> Ended:
    flags = f"{base(fault)} --ckpt-format torch --save {folder} --load {folder} --save-interval 2"
    plants = [Plant(rank=1, at="forward", step=4, do="kill", once=str(folder / "killed"))]
    ended = trial.torchrun(flags, options=fault.torchrun, timeout=TIMEOUT, plants=plants)
    if ended.status or ended.losses != undisturbed():
        raise Wrong(f"ended with {ended.status} and losses {ended.losses}; undisturbed: {undisturbed()}")
    return ended


def _one_port(fault: Fault, folder: Path) -> Ended:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        return trial.torchrun(base(fault), options=f"--master-addr 127.0.0.1 --master-port {port}", timeout=TIMEOUT)


_HOW: dict[str, Callable[[Fault, Path], Ended]] = {
    "link_cut": functools.partial(_link, change=lambda network: network.cut(2)),
    "link_slow": functools.partial(_link, change=lambda network: network.shape(10_000_000)),
    "restart": _restart,
    "one_port": _one_port,
}
