"""The steps of ``ci/gpu/check.sh``, in order of what they teach, and the loop that runs them.

Every step is a process of its own (``record.py``) and has a cap: after that it starts nothing new, keeps what it has,
and the next step begins. Inside a step the cases are ordered in the same way. ``check.sh`` describes the options.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from pack import HERE, IMPORTED, ROOT, use


class Planned(NamedTuple):
    """A step: a function of its name."""

    title: str
    seconds: int
    """Cap, counted from the start of its process, in a call with ``--seconds``; other calls have ``LONGER``."""
    module: str = ""
    """Where the step's function is, if not in a module of its name."""
    measures: bool = False
    """It only measures, so a crash leaves something unmeasured and nothing wrong."""


PLAN = {
    "environment": Planned("the machine", 20),
    "our_kernels": Planned("our own kernels against their definitions", 75),
    "nccl": Planned("every provider over process groups, through autograd", 110),
    "megatron_training": Planned(
        "Megatron's training with context parallelism, against one rank", 115, "training_runs"
    ),
    "performance": Planned("speed", 100, measures=True),
    "hot_path": Planned("no waiting of the host; peak memory", 40, "overheads"),
    "ring_trace": Planned("launches, and the host's time, in a ring", 25, "overheads", measures=True),
    "huggingface": Planned(
        "training steps of transformers with context parallelism, against one rank", 40, "training_runs"
    ),
    "extremes": Planned("our own kernels many at a time, on large tensors, with non-finite numbers", 80),
    "providers": Planned("every provider with every kernel, against attention in float64", 75),
    "inference": Planned("prefill and decode", 40, "providers"),
    "waiting": Planned("time spent waiting for NCCL, and what runs beside it", 40, "overheads", measures=True),
}
"""The first eight fill a call of nine minutes, the next two one of three."""
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # ranks are forked before CUDA is touched
    "TORCH_COMPILE_DISABLE": "1",  # read when torch._dynamo is imported, which is before ranks are forked
}
"""Environment variables of all steps."""
LONGER = 4
"""Factor of all caps without ``--seconds``: still less than ten minutes a step."""
SMOKE = 10
"""The same for the smoke test, which shares processors with other tests and takes much longer to import torch."""
LEAST_S = 20.0
"""A step with a larger cap does not start with less time than this."""
GRACE_S = 10.0
"""After its cap a step has this time to end what it has begun; then it is killed."""
END_S = 5.0
"""Kept for writing the page."""
NOTHING = {"error": "", "seconds": 0.0, "checks": [], "figures": [], "not_run": []}
"""Results of a step that left none."""
LEFT = ("check.json", "page.md", "check.log", "traces.tar")
"""What a call leaves in ``--out``, where a step that runs has its own file beside them."""


def parse() -> argparse.Namespace:
    """The checked command line; ``steps``: those to run, in their order."""
    parser = argparse.ArgumentParser(
        prog="check.sh", description="Check the plugin on a GPU: correctness, memory, speed. More in ci/gpu/check.sh."
    )
    parser.add_argument("--seconds", metavar="N", type=int, help="stop within N seconds")
    parser.add_argument("--from", dest="resume", metavar="STEP", help="continue with this step")
    parser.add_argument("--only", metavar="STEPS", default="", help=f"run only these of: {' '.join(PLAN)}")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder made by ci/gpu/wheels.sh")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="a folder made by ci/gpu/pack.sh")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, to test the check itself")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out/gpu"), help="default: out/gpu")
    options = parser.parse_args()
    options.steps = options.only.split() or list(PLAN)
    for name in options.steps:
        if name not in PLAN:
            parser.error(f"--only {name}: choose one of {' '.join(PLAN)}")
    if options.resume:
        if options.resume not in options.steps:
            parser.error(f"--from {options.resume}: choose one of {' '.join(options.steps)}")
        options.steps = options.steps[options.steps.index(options.resume) :]
    if options.pack:
        if options.wheels or not (options.pack / "pack.json").exists():
            parser.error(
                f"--pack {options.pack}: give a folder made by ci/gpu/pack.sh, and no --wheels: it has its own"
            )
        options.wheels = options.pack / "wheels"
    if options.wheels and not any(options.wheels.glob("*.whl")):
        parser.error(f"--wheels {options.wheels}: contains no wheels; ci/gpu/wheels.sh {options.wheels} downloads them")
    cuda = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not options.smoke and subprocess.run([sys.executable, "-c", cuda]).returncode:
        parser.error(f"{sys.executable} sees no CUDA device (torch.cuda.is_available()); --smoke runs on a CPU")
    return options


def main() -> int:
    import report  # which reads the plan

    began = time.monotonic()
    options = parse()
    environment = os.environ | ENVIRONMENT
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (*IMPORTED, os.environ.get("PYTHONPATH")))),
        "COMMIT": os.environ.get("COMMIT") or _commit(),
    }
    if options.pack:
        environment |= use(options.pack)
    if options.smoke:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:
        for name in (*LEFT, *(f"{name}.json" for name in PLAN)):
            (options.out / name).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.TemporaryDirectory() as site, _kept(options.out / "check.log"):
        if options.wheels:
            install = ["bash", str(HERE / "wheels.sh"), "--install", str(options.wheels), site, sys.executable]
            if subprocess.run(install).returncode:
                return 2
            environment["PYTHONPATH"] += os.pathsep + site
        try:
            for name in options.steps:
                elapsed = time.monotonic() - began
                seconds = cap(name, options.seconds, elapsed, smoke=options.smoke)
                if seconds is None:
                    print(f"== no time is left for {name}; go on with --from {name}", flush=True)
                    break
                print(f"== {name} (at {elapsed:.0f} s, for {seconds:.0f} s at most)", flush=True)
                run(name, seconds, options, environment)
                report.join(options.out, name)
        finally:
            print("== result", flush=True)
            wrong = report.finish(options.out)
        return wrong


def _commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""


def _stop(*_: object) -> NoReturn:
    """Unwind, so that no step outlives this process and the page has what it found; another signal changes nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def cap(name: str, budget: int | None, elapsed: float, *, smoke: bool) -> float | None:
    """Seconds for a step; None: too few are left of the budget."""
    seconds = float(PLAN[name].seconds)
    if budget is None:
        return seconds * (SMOKE if smoke else LONGER)
    left = budget - elapsed - GRACE_S - END_S
    return min(seconds, left) if left >= min(seconds, LEAST_S) else None


def run(name: str, seconds: float, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Run one step; kill it with all its processes if it does not end after its cap, or if this process ends."""
    file = options.out / f"{name}.json"
    file.unlink(missing_ok=True)
    words = [f"{PLAN[name].module or name}:{name}", str(options.out), str(seconds), str(time.monotonic())]
    command = [sys.executable, str(HERE / "record.py"), *words, *(["--smoke"] if options.smoke else [])]
    step, ended = subprocess.Popen(command, env=dict(environment), process_group=0), ""
    try:
        status = step.wait(seconds + GRACE_S)
        if status not in (0, 1):
            print(f"{name}: exit status {status}", flush=True)
    except subprocess.TimeoutExpired:
        ended = f"killed {GRACE_S:g} s after the cap of {seconds:g} s for {name}"
    except SystemExit:
        ended = "the call was stopped"
        raise
    finally:
        if step.poll() is None:
            os.killpg(step.pid, signal.SIGKILL)
            step.wait()
        if ended:
            print(f"{name}: {ended}", flush=True)
            left = json.loads(file.read_text()) if file.exists() else {}
            during = f", during {left['now']}" if left.get("now") else ""
            file.write_text(json.dumps(NOTHING | left | {"step": name, "finished": False, "capped": ended + during}))


@contextmanager
def _kept(log: Path) -> Iterator[None]:
    """Send all output, of child processes too, to the log as well."""
    sys.stdout.flush()
    before = [os.dup(stream) for stream in (1, 2)]
    with subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE, process_group=0) as tee:
        assert tee.stdin is not None
        for stream in (1, 2):
            os.dup2(tee.stdin.fileno(), stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            for stream, old in zip((1, 2), before, strict=True):
                os.dup2(old, stream)
                os.close(old)


if __name__ == "__main__":
    sys.exit(main())
