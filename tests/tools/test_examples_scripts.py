"""The examples' command, script and launchers, with a ``torchrun`` and a ``srun`` that record their arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import cp_plugin
from processes import wait_until

from cp_plugin.tools.examples import config
from cp_plugin.tools.examples.cli import render
from cp_plugin.tools.examples.config import Experiment, experiment, load, words

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "attention2d-64xa100"
RECORDS = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$RECORDS/{name}.args"
env > "$RECORDS/{name}.env"
"""
HOSTS = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'n7\\nn8\\n'; else echo "$@" > "$RECORDS/requeued"; fi
"""
WAITS = """
bash -c 'trap "echo rank >> $RECORDS/terminated; exit" TERM; while true; do sleep 0.05; done' &
echo up > "$RECORDS/{name}.up"
wait
"""
FORWARDS = """
trap 'echo forwarded > "$RECORDS/forwarded"; exit 0' USR1
echo up > "$RECORDS/srun.up"
while true; do sleep 0.05; done
"""


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment with fake torchrun, srun and scontrol, which write to ``RECORDS``, and a dataset."""
    (tmp_path / "bin").mkdir()
    for name, text in {"torchrun": RECORDS, "srun": RECORDS, "scontrol": HOSTS}.items():
        path = tmp_path / "bin" / name
        path.write_text(text.replace("{name}", name))
        path.chmod(0o755)
    (tmp_path / "data.idx").touch()
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "RECORDS": str(tmp_path),
        "DATA_PREFIX": str(tmp_path / "data"),
        "WORK": str(tmp_path / "work"),
    }


def append(tools: dict[str, str], name: str, text: str) -> None:
    """Add lines to a fake program."""
    with (Path(tools["PATH"].partition(":")[0]) / name).open("a") as file:
        file.write(text.replace("{name}", name))


def run(script: Path, *words: str, env: dict[str, str], **named: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(script), *words], env={**env, **named}, capture_output=True, text=True, timeout=60, check=False
    )


def recorded(tools: dict[str, str], name: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment of a program."""
    folder = Path(tools["RECORDS"])
    lines = (folder / f"{name}.env").read_text().splitlines()
    return (folder / f"{name}.args").read_text().splitlines(), dict(line.split("=", 1) for line in lines if "=" in line)


def flags_of(experiment: Experiment, seq_length: int | None = None) -> list[str]:
    return [word for line in words(experiment.with_length(seq_length)) for word in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for every example, with its script."""
    folder = tmp_path_factory.mktemp("examples")
    for name in config.names():
        (folder / name).mkdir()
        (folder / name / "train.sh").write_text(render(experiment(name)))
    return folder


@pytest.mark.parametrize("name", config.names())
def test_a_node_starts_its_ranks(name: str, tools: dict[str, str], tmp_path: Path) -> None:
    """The last length of some variants: torchrun's arguments, and the flags of the command."""
    for of in list(load(name).values())[:3]:
        cluster, length = of.cluster, of.lengths[-1]
        (tmp_path / "train.sh").write_text(render(of, length))
        chosen = {"NODE_RANK": str(cluster.nodes - 1), "MASTER_ADDR": "n0"}
        done = run(tmp_path / "train.sh", "--lr", "1", env=tools, **chosen)
        assert done.returncode == 0, done.stderr
        started, env = recorded(tools, "torchrun")
        at = started.index("-m")
        start = dict(zip(started[:at:2], started[1:at:2], strict=True))
        where = {"--node-rank": str(cluster.nodes - 1), "--master-addr": "n0", "--master-port": "29500"}
        assert start == {"--nnodes": str(cluster.nodes), "--nproc-per-node": str(cluster.per_node), **where}
        data = ["--data-path", tools["DATA_PREFIX"], "--data-cache-path", f"{tools['WORK']}/cache"]
        assert started[at + 1 :] == ["cp_plugin.pretrain_gpt", *flags_of(of, length), *data, "--lr", "1"]
        sharded = "--use-megatron-fsdp" in started
        assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == ("8" if sharded else "1")


def test_checkpoints_and_a_checkout(tools: dict[str, str], tmp_path: Path, folder: Path) -> None:
    (tmp_path / "mlm").mkdir()
    (tmp_path / "mlm" / "pretrain_gpt.py").touch()
    named = {"NODE_RANK": "0", "MASTER_ADDR": "n0", "CHECKPOINTS": "/c", "MEGATRON_LM_PATH": str(tmp_path / "mlm")}
    script = folder / NAME / "train.sh"
    assert run(script, env=tools, **named).returncode == 0
    started, _ = recorded(tools, "torchrun")
    at = started.index("-m")
    assert started[at + 1 : at + 3] == ["cp_plugin.run", str(tmp_path / "mlm" / "pretrain_gpt.py")]
    saving = ["--save", "/c", "--exit-signal-handler", "--save-interval", "100", "--load", "/c"]
    assert started[-len(saving) :] == saving and "--ckpt-format" in started
    assert "RESUME=/r: there is no checkpoint" in run(script, env=tools, **named, RESUME="/r").stderr
    (tmp_path / "latest_checkpointed_iteration.txt").touch()
    assert run(script, env=tools, **named, RESUME=str(tmp_path)).returncode == 0
    assert recorded(tools, "torchrun")[0][-2:] == ["--load", str(tmp_path)]


def test_usr1_becomes_sigterm_for_the_ranks(tools: dict[str, str], folder: Path) -> None:
    """torchrun is left alone and ends with them."""
    append(tools, "torchrun", WAITS)
    env = {**tools, "NODE_RANK": "0", "MASTER_ADDR": "n0"}
    with subprocess.Popen(["bash", folder / NAME / "train.sh"], env=env) as script:
        wait_until((Path(tools["RECORDS"]) / "torchrun.up").exists)
        time.sleep(0.2)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(30) == 0
    assert (Path(tools["RECORDS"]) / "terminated").read_text() == "rank\n"


def test_the_status_is_torchruns(tools: dict[str, str], folder: Path) -> None:
    append(tools, "torchrun", "exit 37\n")
    assert run(folder / NAME / "train.sh", env={**tools, "NODE_RANK": "0", "MASTER_ADDR": "n0"}).returncode == 37


SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_NNODES": "16", "SLURM_GPUS_ON_NODE": "4"}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Slurm's variables, and a script to run on each node."""
    (tmp_path / "train.sh").touch()
    return {**SLURM, "SLURM_SUBMIT_DIR": str(tmp_path), "TRAIN": str(tmp_path / "train.sh")}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK is not set: the number of this node, 0 to 15"),
        ({"DATA_PREFIX": "/none"}, "there is no /none.idx; cp-plugin dataset writes one"),
        ({"PATH": "/usr/bin:/bin"}, "torchrun is not on the PATH"),
        *(({name: ""}, f"launch.sbatch: {name} is not set: ") for name in (*list(SLURM)[:3], "SLURM_SUBMIT_DIR")),
    ],
)
def test_refusals_of_scripts(
    tools: dict[str, str], slurm: dict[str, str], named: dict[str, str], message: str, folder: Path
) -> None:
    job = [EXAMPLES / "launch.sbatch", NAME] if "launch" in message else [folder / NAME / "train.sh"]
    done = run(*job, env={**tools, **slurm, "NODE_RANK": "1", "MASTER_ADDR": "n0", **named})
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (Path(tools["RECORDS"]) / "torchrun.args").exists()


@pytest.mark.parametrize(("status", "requeued"), [(0, "requeue 42\n"), (3, None)], ids=["it ended", "it failed"])
def test_a_job_out_of_time_is_requeued_unless_it_failed(
    status: int, requeued: str | None, tools: dict[str, str], slurm: dict[str, str]
) -> None:
    append(tools, "srun", FORWARDS.replace("exit 0", f"exit {status}"))
    records = Path(tools["RECORDS"])
    line = ["bash", EXAMPLES / "launch.sbatch", NAME]
    with subprocess.Popen(line, env={**tools, **slurm}, stderr=subprocess.DEVNULL) as job:
        wait_until((records / "srun.up").exists)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == status
    assert (records / "forwarded").exists()
    file = records / "requeued"
    assert (file.read_text() if file.exists() else None) == requeued


def test_the_launcher_starts_the_ranks_of_the_example_that_is_named(tools: dict[str, str]) -> None:
    """The script that it renders once is started on each node."""
    tools["PATH"] = f"{tools['PATH'].partition(':')[0]}:{Path(sys.executable).parent}:{tools['PATH']}"
    chosen, root = ["burst-32xa100", "without-zero", "32768", "--lr", "1"], tools["RECORDS"]
    job = {**SLURM, "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": root}
    done = run(EXAMPLES / "launch.sbatch", *chosen, env=tools, PYTHONPATH=os.environ.get("PYTHONPATH", ""), **job)
    assert done.returncode == 0, done.stderr
    started, env = recorded(tools, "srun")
    script = Path(tools["WORK"]) / "train-42.sh"
    assert started[-4:] == ["bash", str(script), "--lr", "1"] and "--kill-on-bad-exit=1" in started
    assert script.read_text() == render(experiment(*chosen[:2]), int(chosen[2]))
    values = [env[key] for key in ("MASTER_ADDR", "MASTER_PORT", "NNODES", "GPUS_PER_NODE", "CHECKPOINTS")]
    assert values == ["n7", "15042", "4", "8", f"{root}/out/burst-32xa100/checkpoints"]
    assert not (Path(root) / "requeued").exists()


def test_the_list_and_one_of_it() -> None:
    listed = cp_plugin("example")
    assert listed.exit_code == 0 and all(name in listed.output for name in config.names())
    for name in config.names():
        base = experiment(name)
        shown, flags = cp_plugin("example", name), cp_plugin("example", name, "--print", "flags")
        assert shown.exit_code == flags.exit_code == 0 and base.title in shown.output
        assert all(variant in shown.output for variant in load(name))
        assert f"Next: cp-plugin example {name}" in shown.output and "--print sh" in shown.output
        assert flags.output.split() == flags_of(base)
