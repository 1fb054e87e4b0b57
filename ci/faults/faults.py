"""The faults: what is done to a training of a few steps, how it must end, and what must be said.

Every fault is one line of ``FAULTS``. ``expect`` is ``ends`` (all ranks end with an error within 1.5 times the timeout,
and the message matches), ``survives`` (the training goes on to its end), or ``resumes`` (it stops, and the next start
goes on with exactly the losses of an undisturbed run). What needs more than a plant in a rank is a function of
``special`` with the name ``how``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from planted import Plant

TIMEOUT = 20.0
"""Seconds that torch.distributed waits in a trial."""
LIMIT = 1.5
"""Times the timeout, from the fault to the end of the last rank."""
WHO = r"cp_plugin: rank {rank} of {ranks} on \S+: "
PLANTED = "RuntimeError: planted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    what: str
    """In words."""
    expect: Literal["ends", "survives", "resumes"] = "ends"
    says: str = ""
    """A pattern that the output must have."""
    plants: tuple[Plant, ...] = ()
    flags: str = ""
    ranks: int = 2
    how: str = "plain"
    short: bool = False
    """Whether it is one of the short form."""
    needs: Literal["", "root", "torchrun"] = ""

    def __post_init__(self) -> None:
        re.compile(self.says)

    @property
    def slow(self) -> bool:
        """Whether the ranks wait for the timeout: best begun first."""
        return any(plant.do == "stop" for plant in self.plants)


def _in_step(name: str, what: str, at: str, do: str, says: str, *, ranks: int = 4, short: bool = False) -> Fault:
    return Fault(name=name, what=what, says=says, plants=(Plant(rank=1, at=at, do=do),), ranks=ranks, short=short)


def _first(rank: int, ranks: int, story: str) -> str:
    """The report of ``rank``, told with a story, and all other ranks below it: where they were, or silent.

    Where they were is chance: they may still be at the end of the step before.
    """
    others = (str(other) for other in range(ranks) if other != rank)
    below = "".join(
        rf"(?=(?:  .*\n)*?  ranks? (?:\d+, )*{other}(?:, \d+)*(?:: \S| on \S+ says nothing))" for other in others
    )
    return WHO.format(rank=rank, ranks=ranks) + story + r".*\n" + below


_SILENT = r"rank 1 on \S+ says nothing: killed, frozen, cut off"
_LOST = r"(?s)of 4 on \S+: step 3, {0}.*exchange along 'cp' with ranks .*" + _SILENT

IN_STEP = (
    _in_step("kill-forward", "SIGKILL in a forward message", "forward", "kill", _LOST.format("forward"), short=True),
    _in_step("kill-backward", "SIGKILL in a backward message", "backward", "kill", _LOST.format("backward")),
    _in_step("kill-optimizer", "SIGKILL in the optimizer", "optimizer", "kill", r"(?s)step 3, .*" + _SILENT),
    _in_step("crash", "SIGSEGV in forward", "forward", "crash", r"(?s)(?=.*killed by SIGSEGV)(?=.*" + _SILENT + ")"),
    _in_step(
        "exit", "the process leaves with status 3", "forward", "exit:3",
        r"(?s)(?=.*ended with status 3)(?=.*" + _SILENT + ")",
    ),
    _in_step("freeze-forward", "SIGSTOP in forward", "forward", "stop", _LOST.format("forward"), short=True),
    _in_step("freeze-backward", "SIGSTOP in backward", "backward", "stop", _LOST.format("backward")),
    _in_step("freeze-optimizer", "SIGSTOP in the optimizer", "optimizer", "stop", r"(?s)step 3, .*" + _SILENT),
    _in_step(
        "raise-forward", "an exception in forward", "forward", "raise:planted",
        _first(1, 4, f"step 3, forward, layer [12], .*{PLANTED}"), short=True,
    ),
    _in_step(
        "raise-backward", "an exception in backward", "backward", "raise:planted",
        _first(1, 4, f"step 3, backward, .*{PLANTED}"),
    ),
    _in_step(
        "raise-optimizer", "an exception in the optimizer", "optimizer", "raise:planted",
        _first(1, 2, f"step 3, optimizer, .*{PLANTED}"), ranks=2,
    ),
    _in_step(
        "memory", "MemoryError in forward", "forward", "memory",
        _first(1, 4, "step 3, forward, layer [12], .*MemoryError"),
    ),
    _in_step(
        "memory-device", "torch.OutOfMemoryError in backward", "backward", "memory:torch",
        _first(1, 4, "step 3, backward, .*OutOfMemoryError: CUDA out of memory"),
    ),
    _in_step("leave", "sys.exit(3) in forward", "forward", "leave:3", _first(1, 4, "step 3, forward, .*SystemExit: 3")),
    Fault(
        name="nan", what="NaN in a gradient of one rank", ranks=2, how="saving", short=True,
        plants=(Plant(rank=1, at="gradient", do="nan"),),
        says=r"(?s)Unexpected result nan on rank 1 at iteration #\d.*found NaN.*cp_plugin: rank . of 2 on \S+: step 3",
    ),
    Fault(
        name="slow-rank", what="a rank stands still for 3 s", expect="survives",
        plants=(Plant(rank=1, do="sleep:3"),),
    ),
)  # fmt: skip

START = (
    Fault(
        name="late", what="a rank starts 5 s late", expect="survives", plants=(Plant(rank=1, at="start", do="sleep:5"),)
    ),
    Fault(
        name="never", what="a rank never joins", says=r"1/2 clients joined|Timed out|DistStoreError|DistNetworkError",
        plants=(Plant(rank=1, at="join", do="stop"),),
    ),
    Fault(
        name="import", what="a rank fails before torch.distributed is there", says=r"rank 1 of 2 failed first",
        plants=(Plant(rank=1, at="start", do="raise:no such library"),),
    ),
    Fault(
        name="flags", what="another --seq-length on a rank", how="rank_flags",
        says=r"different settings: --seq-length is 32 on rank 0 and 64 on rank 1", short=True,
    ),
    Fault(name="plugin-version", what="another cp_plugin on a rank", how="plugin_version",
          says=r"different settings: cp_plugin is \S+ on rank 0 and '?9.9.9'? on rank 1"),
    Fault(name="megatron-version", what="another megatron-core on a rank", how="megatron_version",
          says=r"megatron-core is \S+ on rank 0 and 0.18.0 on rank 1"),
    Fault(name="environment", what="another OMP_NUM_THREADS, locale and time zone on a rank", how="environment",
          expect="survives"),
    Fault(name="world-size", what="WORLD_SIZE is 3 on a rank", how="world_size",
          says=r"rank . of 2 failed|clients joined|Timed out|DistStoreError"),
    Fault(name="world-too-small", what="3 ranks for --context-parallel-size 2", how="odd_world", ranks=3,
          says=r"(world size|world_size).*(3).*(divisible|2)"),
    Fault(name="data-index", what="a dataset index that is cut short", how="cut_index", says=r"\.idx|index"),
)  # fmt: skip

_NOT_WHOLE = (
    r"--load \S+: the checkpoint of iteration 4 (cannot be read|is not there|was not written).*"
    r"Complete ones: 2; take one with --ckpt-step 2"
)
CHECKPOINT = (
    *(Fault(name=f"cut-{name}", what=f"{file} of the checkpoint cut to half", how=f"cut:{file}", short=name == "data",
          says=_NOT_WHOLE)
    for name, file in (("data", "__0_0.distcp"), ("rank-1", "__1_0.distcp"), ("index", ".metadata"),
                       ("format", "metadata.json"))),
    Fault(name="lost-data", what="__1_0.distcp of the checkpoint is not there", how="cut:-__1_0.distcp",
          says=_NOT_WHOLE),
    Fault(name="zero-data", what="__1_0.distcp of the checkpoint has nothing but zeros", how="cut:0__1_0.distcp",
          says=_NOT_WHOLE),
    Fault(name="cut-torch", what="the file of a checkpoint of the torch format cut to half", how="cut_torch",
          says=_NOT_WHOLE),
    Fault(name="latest-nothing", what="the note of the last iteration names one that is not there", how="latest:9",
          says=r"the checkpoint of iteration 9 is not there.*--ckpt-step 4"),
    Fault(name="latest-empty", what="the note of the last iteration is empty", how="latest:", expect="resumes",
          says=r"Taking iteration 4, the newest complete checkpoint", short=True),
    Fault(name="directory-full", what="--save on a file system of 40 kB", how="full", needs="root",
          says=r"No space left|writing a checkpoint"),
    Fault(name="directory-full-dist", what="the same, in the torch_dist format", how="full:torch_dist", needs="root",
          says=r"(?s)(?=.*No space left)(?=.*" + WHO.format(rank=r"\d", ranks=2)
          + r"step 2, writing a checkpoint[^\n]*OSError)"),
    Fault(name="directory-unwritable", what="--save below a file", how="unwritable",
          says=r"Not a directory|NotADirectoryError"),
    Fault(name="logs-full", what="TensorBoard on a full file system", how="logs_full", needs="root",
          says=r"No space left"),
    Fault(name="kill-checkpoint", what="SIGKILL while a checkpoint is written", how="kill_saving", expect="resumes"),
)  # fmt: skip

SIGNALS = (
    Fault(name="ctrl-c", what="Ctrl-C at the launcher", says=r"interrupted; 2 ranks stopped",
          plants=(Plant(rank=1, do="signal-launcher:SIGINT"),), short=True),
    Fault(name="term", what="SIGTERM at the launcher", says=r"rank . of 2 failed first\s+.*killed by SIGTERM",
          plants=(Plant(rank=1, do="signal-launcher:SIGTERM"),)),
    Fault(name="requeue", what="SIGTERM at the launcher under --exit-signal-handler (Slurm's requeue)", how="requeue",
          expect="resumes", says=r"exiting program after receiving SIGTERM"),
)  # fmt: skip

CLUSTER = (
    Fault(name="link-cut", what="the link of node 1 goes down", how="link_cut", needs="root", ranks=4,
          says=r"of 4 on \S+: step \d+, .*Timed out waiting"),
    Fault(name="link-slow", what="all links 100 times slower", how="link_slow", needs="root", ranks=4,
          expect="survives"),
)  # fmt: skip

TORCHRUN = (
    Fault(name="torchrun-kill", what="SIGKILL of a rank under torchrun", how="torchrun", needs="torchrun",
          plants=(Plant(rank=1, do="kill"),), says=r"(?s)says nothing: killed.*|Root Cause.*rank +: 1 .*SIGKILL"),
    Fault(name="torchrun-restart", what="SIGKILL once under torchrun --max-restarts 2", how="restart",
          expect="resumes", needs="torchrun"),
    Fault(name="one-port", what="two jobs on one port", how="one_port", needs="torchrun",
          says=r"EADDRINUSE|address already in use"),
)  # fmt: skip

FAULTS = (*IN_STEP, *START, *CHECKPOINT, *SIGNALS, *CLUSTER, *TORCHRUN)
