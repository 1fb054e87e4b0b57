"""Start the ranks of a training run: forked, or by torchrun or srun, whose ranks write files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import sides
import torch
from sides import Training
from training import Record

from cp_plugin.testing.launch import RankError, run_ranks

TIMEOUT_S = 900.0
_PROGRAM = Path(__file__).with_name("sides.py")
_RANK_OF_SLURM = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$0" "$@"'
COMMANDS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{ranks}"),
    "srun": ("srun", "--ntasks", "{ranks}", "--kill-on-bad-exit=1", "bash", "-c", _RANK_OF_SLURM, sys.executable),
}
LAUNCHERS = ("forked", *COMMANDS)
LAST_OUTPUT = "last output: "
"""Begins the line with what a crashed rank printed last."""


class Failed(Exception):
    """A failed training, with the message of the first failing rank."""


class Runner:
    """Runs training runs, those shared by several cases only once."""

    def __init__(self, launcher: str, folder: Path, script: str | None) -> None:
        self._launcher, self._folder, self._script = launcher, folder, script
        self._known: dict[Training, list[Record] | Failed] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def once(self, training: Training) -> list[Record]:
        """Train, and return the records of all ranks without caching them. Raises Failed."""
        return self._forked(training) if self._launcher == "forked" else self._launched(training)

    def run(self, training: Training) -> list[Record]:
        """The records of all ranks, cached. Raises Failed, again on later calls."""
        if training not in self._known:
            try:
                self._known[training] = self.once(training)
            except Failed as failed:
                self._known[training] = failed
        result = self._known[training]
        if isinstance(result, Failed):
            raise result
        return result

    def _forked(self, training: Training) -> list[Record]:
        log = self._folder / f"logs/{_name(training)}.log"
        try:
            records = run_ranks(sides.train, training.ranks, args=(training, self._script, log), timeout=TIMEOUT_S)
        except RankError as error:
            text = error.traceback
            if error.exit_status < 0:  # a library that aborts says why on stderr, and there is no exception
                output = sides.output(log, error.rank)
                printed = output.read_text(errors="replace").splitlines() if output.exists() else []
                text += f"\n{LAST_OUTPUT}{' / '.join(line.strip() for line in printed[-3:])}"
            with log.open("a") as file:
                file.write(f"\nrank {error.rank}:\n{text}")
            raise Failed(text) from None
        for rank in range(1, training.ranks):
            sides.output(log, rank).unlink(missing_ok=True)
        return records

    def _launched(self, training: Training) -> list[Record]:
        folder, log = self._folder / f"records/{_name(training)}", self._folder / f"logs/{_name(training)}.log"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        start = [word.format(ranks=training.ranks) for word in COMMANDS[self._launcher]]
        command = [*start, str(_PROGRAM), str(folder), json.dumps(asdict(training)), self._script or ""]
        with log.open("wb") as output:
            world = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | os.environ
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=world)
        if done.returncode:
            raise Failed(log.read_text(errors="replace")[-20000:] + f"\n{self._launcher}: status {done.returncode}")
        files = [sides.record_file(folder, rank) for rank in range(training.ranks)]
        if missing := [file.name for file in files if not file.exists()]:
            raise Failed(f"{folder}: {len(missing)} of {training.ranks} ranks left no record: {', '.join(missing[:8])}")
        return [Record(**torch.load(file, weights_only=True)) for file in files]


def _name(training: Training) -> str:
    digest = hashlib.sha256(f"{training.flags} {training.documents} {training.kernels}".encode()).hexdigest()[:10]
    return f"{training.side}-{training.ranks}-{digest}"
