"""The table of faults: what happens to a short training, how it must end, and which message it must print.

``expect`` is ``ends`` (all ranks exit with an error within 1.5 times the timeout and the message matches), ``survives``
(the training completes), or ``resumes`` (it stops, and the next start continues with exactly the losses of an
undisturbed run).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rank_faults import Plant

TIMEOUT = 20.0
"""Of torch.distributed in a trial, in seconds."""
LIMIT = 1.5
"""Multiple of the timeout allowed between the fault and the exit of the last rank."""
WHO = r"cp_plugin: rank {rank} of {ranks} on \S+: "
PLANTED = "RuntimeError: planted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    what: str
    expect: Literal["ends", "survives", "resumes"] = "ends"
    says: str = ""
    """Pattern that the output must match."""
    plants: tuple[Plant, ...] = ()
    flags: str = ""
    """Megatron's; ``{folder}`` is an empty folder."""
    flags_of_rank_1: str = ""
    ranks: int = 2
    format: Literal["", "torch", "torch_dist"] = ""
    """``--ckpt-format`` of the checkpoints that the training writes to the folder."""
    save_every: int = 1000
    """Steps; by default more than the training has, so it saves only when it is made to exit."""
    room: int = 0
    """Kilobytes of space in the folder; 0: unlimited."""
    torchrun: str = ""
    """Options of torchrun, which then starts the ranks; ``{port}`` is a port in use."""
    link: Literal["", "cut", "slow"] = ""
    """What happens to links of the virtual nodes of ci/cluster, on which the training then runs."""
    short: bool = False
    """Whether ``--short`` runs it."""
    root: bool = False
    """Whether it needs root."""

    def __post_init__(self) -> None:
        re.compile(self.says)

    @property
    def waits_for_timeout(self) -> bool:
        """Such trials are started first."""
        return any(plant.do == "stop" for plant in self.plants)


def _planted(name: str, what: str, at: str, do: str, says: str, *, ranks: int = 4, short: bool = False) -> Fault:
    return Fault(name=name, what=what, says=says, plants=(Plant(rank=1, at=at, do=do),), ranks=ranks, short=short)


def _first(rank: int, ranks: int, story: str) -> str:
    """Pattern of ``rank``'s report with all other ranks below it, each with any position (timing decides) or silent."""
    others = (str(other) for other in range(ranks) if other != rank)
    below = "".join(
        rf"(?=(?:  .*\n)*?  (?:ranks? (?:\d+, )*{other}(?:, \d+)*: \S|no response from rank {other} on \S+ \())"
        for other in others
    )
    return WHO.format(rank=rank, ranks=ranks) + story + r".*\n" + below


_SILENT = r"no response from rank 1 on \S+ \(killed, suspended, unreachable"
_LOST = r"(?s)of 4 on \S+: step 3, {0}.*exchange along 'cp' with ranks .*" + _SILENT

IN_STEP = (
    _planted("kill-forward", "SIGKILL in a forward message", "forward", "kill", _LOST.format("forward"), short=True),
    _planted("kill-backward", "SIGKILL in a backward message", "backward", "kill", _LOST.format("backward")),
    _planted("kill-optimizer", "SIGKILL in the optimizer", "optimizer", "kill", r"(?s)step 3, .*" + _SILENT),
    _planted("crash", "SIGSEGV in forward", "forward", "crash", r"(?s)(?=.*killed by SIGSEGV)(?=.*" + _SILENT + ")"),
    _planted(
        "exit", "the process leaves with status 3", "forward", "exit:3",
        r"(?s)(?=.*ended with status 3)(?=.*" + _SILENT + ")",
    ),
    _planted("freeze-forward", "SIGSTOP in forward", "forward", "stop", _LOST.format("forward"), short=True),
    _planted("freeze-backward", "SIGSTOP in backward", "backward", "stop", _LOST.format("backward")),
    _planted("freeze-optimizer", "SIGSTOP in the optimizer", "optimizer", "stop", r"(?s)step 3, .*" + _SILENT),
    _planted(
        "raise-forward", "an exception in forward", "forward", "raise:planted",
        _first(1, 4, f"step 3, forward, layer [12], .*{PLANTED}"), short=True,
    ),
    _planted(
        "raise-backward", "an exception in backward", "backward", "raise:planted",
        _first(1, 4, f"step 3, backward, .*{PLANTED}"),
    ),
    _planted(
        "raise-optimizer", "an exception in the optimizer", "optimizer", "raise:planted",
        _first(1, 2, f"step 3, optimizer, .*{PLANTED}"), ranks=2,
    ),
    _planted(
        "memory", "MemoryError in forward", "forward", "memory",
        _first(1, 4, "step 3, forward, layer [12], .*MemoryError"),
    ),
    _planted(
        "memory-device", "torch.OutOfMemoryError in backward", "backward", "memory:torch",
        _first(1, 4, "step 3, backward, .*OutOfMemoryError: CUDA out of memory"),
    ),
    _planted("leave", "sys.exit(3) in forward", "forward", "leave:3", _first(1, 4, "step 3, forward, .*SystemExit: 3")),
    Fault(
        name="nan", what="NaN in a gradient of one rank", ranks=2, format="torch", short=True,
        plants=(Plant(rank=1, at="gradient", do="nan"),),
        says=r"(?s)Unexpected result nan on rank 1 at iteration #\d.*found NaN.*cp_plugin: rank . of 2 on \S+: step 3",
    ),
    Fault(
        name="slow-rank", what="a rank pauses for 3 s", expect="survives",
        plants=(Plant(rank=1, do="sleep:3"),),
    ),
)  # fmt: skip

_AGREEMENT = "cp_plugin.megatron.patches.hooks"
START = (
    Fault(
        name="late", what="a rank starts 5 s late", expect="survives", plants=(Plant(rank=1, at="start", do="sleep:5"),)
    ),
    Fault(
        name="never", what="a rank never joins", says=r"1/2 clients joined|Timed out|DistStoreError|DistNetworkError",
        plants=(Plant(rank=1, at="join", do="stop"),),
    ),
    Fault(
        name="import", what="a rank fails before torch.distributed is initialised", says=r"rank 1 of 2 failed first",
        plants=(Plant(rank=1, at="start", do="raise:no such library"),),
    ),
    Fault(
        name="flags", what="another --seq-length on a rank",
        flags_of_rank_1="--seq-length 64 --max-position-embeddings 64",
        says=r"different settings: --seq-length is 32 on rank 0 and 64 on rank 1", short=True,
    ),
    Fault(name="plugin-version", what="another cp_plugin on a rank",
          plants=(Plant(rank=1, at="start", do=f"replace:{_AGREEMENT}.__version__=9.9.9"),),
          says=r"different settings: cp_plugin is \S+ on rank 0 and '?9.9.9'? on rank 1"),
    Fault(name="megatron-version", what="another megatron-core on a rank",
          plants=(Plant(rank=1, at="start", do=f"replace:{_AGREEMENT}.megatron_version=0.18.0"),),
          says=r"megatron-core is \S+ on rank 0 and 0.18.0 on rank 1"),
    Fault(name="environment", what="another OMP_NUM_THREADS, locale and time zone on a rank", expect="survives",
          plants=(Plant(rank=1, at="start", do="environment:OMP_NUM_THREADS=7 LC_ALL=C TZ=Asia/Tokyo"),)),
    Fault(name="world-size", what="WORLD_SIZE is 3 on a rank",
          plants=(Plant(rank=1, at="start", do="environment:WORLD_SIZE=3"),),
          says=r"rank 1: --world-size 3: |rank . of 2 failed|clients joined|Timed out|DistStoreError"),
    Fault(name="world-too-small", what="3 ranks for --context-parallel-size 2", ranks=3,
          flags="--context-parallel-size 2", says=r"(world size|world_size).*(3).*(divisible|2)"),
)  # fmt: skip

CHECKPOINT = (
    Fault(name="directory-full", what="--save on a file system of 40 kB", format="torch", save_every=2, room=40,
          root=True, says=r"No space left|writing a checkpoint"),
    Fault(name="directory-full-dist", what="the same, in the torch_dist format", format="torch_dist", save_every=2,
          room=40, root=True,
          says=r"(?s)(?=.*No space left)(?=.*" + WHO.format(rank=r"\d", ranks=2)
          + r"step 2, writing a checkpoint(?:[^\n]*\n  )*?[^\n]*OSError)"),
    Fault(name="logs-full", what="TensorBoard on a full file system", room=4, root=True,
          flags="--tensorboard-dir {folder} --tensorboard-queue-size 1", says=r"No space left"),
    Fault(name="kill-checkpoint", what="SIGKILL while a checkpoint is written", format="torch_dist", save_every=2,
          plants=(Plant(rank=1, at="saving:0.005", step=4, do="kill"),), expect="resumes"),
)  # fmt: skip

SIGNALS = (
    Fault(name="ctrl-c", what="Ctrl-C at the launcher", says=r"interrupted; 2 ranks stopped",
          plants=(Plant(rank=1, do="signal-launcher:SIGINT"),), short=True),
    Fault(name="term", what="SIGTERM at the launcher", says=r"rank . of 2 failed first\s+.*killed by SIGTERM",
          plants=(Plant(rank=1, do="signal-launcher:SIGTERM"),)),
    Fault(name="requeue", what="SIGTERM at the launcher under --exit-signal-handler (Slurm's requeue)",
          format="torch", flags="--exit-signal-handler", plants=(Plant(rank=1, do="signal-launcher:SIGTERM"),),
          expect="resumes", says=r"exiting program after receiving SIGTERM"),
)  # fmt: skip

CLUSTER = (
    Fault(name="link-cut", what="the link of node 1 goes down", link="cut", root=True, ranks=4,
          says=r"of 4 on \S+: step \d+, .*Timed out waiting"),
    Fault(name="link-slow", what="all links 100 times slower", link="slow", root=True, ranks=4,
          expect="survives"),
)  # fmt: skip

TORCHRUN = (
    Fault(name="torchrun-kill", what="SIGKILL of a rank under torchrun", torchrun="--standalone",
          plants=(Plant(rank=1, do="kill"),), says=r"(?s)no response from rank.*|Root Cause.*rank +: 1 .*SIGKILL"),
    Fault(name="torchrun-restart", what="SIGKILL once under torchrun --max-restarts 2", expect="resumes",
          torchrun="--standalone --max-restarts 2", format="torch", save_every=2, flags="--load {folder}",
          plants=(Plant(rank=1, step=4, do="kill", once="{folder}/killed"),)),
    Fault(name="one-port", what="two jobs on one port", torchrun="--master-addr 127.0.0.1 --master-port {port}",
          says=r"EADDRINUSE|address already in use"),
)  # fmt: skip

FAULTS = (*IN_STEP, *START, *CHECKPOINT, *SIGNALS, *CLUSTER, *TORCHRUN)
