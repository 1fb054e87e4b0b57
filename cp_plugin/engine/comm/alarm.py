"""The alarm: one rank's failure reaches all others at once, instead of through their own timeouts.

    rank 1 fails -> Alarm.give -> the run's store -> a listening thread of every other rank
                                       ^                     |
                                       +--- where it is  <---+     then the rank is ended, unless it ends by itself
    rank 1 prints one report: what failed; where every other rank was; who did not answer

The thread sleeps in its own connection to the store and costs nothing until something fails. A rank that does not
answer is killed, frozen, cut off, or inside a call that holds Python's lock.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from cp_plugin.engine.common import background
from cp_plugin.engine.common.text import group_ranks, ranks_named

EXIT_STATUS = 70
"""Exit status of a rank that another rank's failure ended."""
_FIRST, _TELLER, _ALARM = "failed", "teller", "alarm"
_FOREVER = datetime.timedelta(days=365)
_ANSWER_S = 2.0  # for the others' answers; the report is out before launch stops the ranks, _GRACE_S later
_LEAVE_S = 20.0  # for a rank to end by itself, or to be ended by its launcher


class Alarm:
    """One per rank; created once torch.distributed's default group exists."""

    def __init__(self, store: dist.Store, rank: int, size: int, where: Callable[[], str]) -> None:
        """
        Args:
            store: of the run.
            rank, size: of this process, and the number of ranks.
            where: what this rank's main thread is doing, in a few words; called in another thread.
        """
        self.rank, self.size = rank, size
        self._where = where
        # torchrun keeps its store across restarts, with the previous start's alarm in it
        prefix = f"cp_plugin_alarm/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store, self._asleep = (dist.PrefixStore(prefix, store.clone()) for _ in range(2))  # type: ignore[attr-defined]
        self._silenced = threading.Event()
        self._store.set(f"host/{rank}", socket.gethostname())
        background.start(self._listen, "cp_plugin_alarm")

    def give(self, story: str) -> str | None:
        """Tell all ranks what happened here. The first rank to fail gets the report, all others None.

        Takes a few seconds at most, even where the store cannot be reached.
        """
        self._silenced.set()
        reports: list[str | None] = []

        def talk() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                reports.append(self._tell(story))

        talking = background.start(talk, "cp_plugin_talk")  # on a cut link a call blocks until TCP gives up
        talking.join(1.5 * _ANSWER_S)
        if reports:
            return reports[0]
        own = f"rank {self.rank} of {self.size} on {socket.gethostname()}: {story}"
        return f"{own}\n  no contact with the other ranks: rank 0, or the process that keeps the run's store, is gone"

    def _tell(self, story: str) -> str | None:
        self._store.set(f"said/{self.rank}", story)
        if self._store.add(_FIRST, 1) > 1:
            return None
        self._store.set(_TELLER, str(self.rank))
        self._store.set(_ALARM, story)
        deadline = time.monotonic() + _ANSWER_S
        others = [rank for rank in range(self.size) if rank != self.rank]
        said: dict[int, str] = {}
        while len(said) < len(others) and time.monotonic() < deadline:
            for rank in others:
                if rank not in said and self._store.check([f"said/{rank}"]):
                    said[rank] = self._store.get(f"said/{rank}").decode()
            time.sleep(0.02)
        return report(self.signature(self.rank), story, said, {r: self._host(r) for r in others if r not in said})

    def signature(self, rank: int) -> str:
        """``rank 1 of 4 on HOST``."""
        return f"rank {rank} of {self.size} on {self._host(rank)}"

    def _host(self, rank: int) -> str:
        known = self._store.check([f"host/{rank}"])
        return self._store.get(f"host/{rank}").decode() if known else "an unknown host"

    def _listen(self) -> None:
        try:
            self._asleep.wait([_ALARM], _FOREVER)
            teller = int(self._asleep.get(_TELLER))
            where = self._where()
            if self._silenced.wait(_ANSWER_S / 2):  # it fails, too, and says why
                return
            self._asleep.set(f"said/{self.rank}", f"no error; {where}")
            story = self._asleep.get(_ALARM).decode()
            if self._silenced.wait(_LEAVE_S):
                return
            own, other = map(self.signature, (self.rank, teller))
            end = f"cp_plugin: terminating {own}: another rank failed. {other}: {story}"
            print(end, file=sys.stderr, flush=True)
        except (RuntimeError, OSError):  # the store is gone: the run has ended, or rank 0 is lost
            return
        os._exit(EXIT_STATUS)


def report(who: str, story: str, said: Mapping[int, str], silent: Mapping[int, str]) -> str:
    """A message of several lines: who failed and how, what the others said, who did not answer (rank -> host)."""
    ranks = sorted(said)
    stories = group_ranks([said[rank] for rank in ranks], ranks)
    lines = [f"{who}: {story}", *(f"{ranks_named(ranks)}: {text}" for text, ranks in stories.items())]
    lines += [
        f"no response from rank {rank} on {host} (killed, suspended, unreachable, or holding the GIL)"
        for rank, host in sorted(silent.items())
    ]
    return "\n  ".join(lines)
