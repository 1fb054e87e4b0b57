"""Every command in the README and the pages is executed, here or by a test named here.

A command in a fenced block runs as printed, or smaller by a rule of ``SMALLER``, or a test in ``COVERED`` runs it. A
training command goes through torchrun's parser, then through the parser and validation of Megatron and the plugin, for
all its devices. Inline code that is a whole command runs as well; a mention (``cp-plugin plan``) must name something
that exists. An unknown command fails the test.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import third_party
import typer
from commands import cp_plugin
from nightly import NIGHT, nightly
from printed import FLAGS, ROOT, Printed, fenced, inline
from warm import cpu_mode, warm_up

from cp_plugin import run
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.planned import command as planned
from cp_plugin.planner.machine import hardware
from cp_plugin.testing.nproc import split_nproc
from cp_plugin.tools.app import app

_TRAINING = (
    "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 128256 --seq-length 131072 --max-position-embeddings 131072 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-distributed-optimizer "
    "--context-parallel-size 8"
)
TRAINING = _TRAINING.split()
"""Replaces ``<your Megatron flags>``."""
SMALLER = {
    r"cp-plugin verify\b": "--provider ring --dtype bfloat16 --heads 16 --kv-heads 8 --head-dim 8 --mask causal",
    r"cp-plugin traffic --measure": "--provider ring",  # of all providers: tests/engine/methods/test_bytes.py
}
"""Pattern of a command -> options that it gets unless it has them itself."""
COVERED = {
    r"(python3? )?examples/quickstart\.(sh|py)\b": "tools/test_quickstart.py::test_it_passes_and_leaves_a_plot",
    r"(python3? )?examples/packed\.py\b": "tools/test_quickstart.py::test_placed_packs_train_as_on_one_rank",
    r"python examples/hybrid\.py": (
        "tools/test_quickstart.py::test_linear_hybrid_and_softmax_models_pass_and_leave_a_plot"
    ),
    r"ci/\w+\.sh\b": "tools/test_printed_commands.py::test_scripts_run_what_they_say",
    r"(ruff|lint-imports|(pip install )?pre-commit)": "tools/test_printed_commands.py::test_scripts_run_what_they_say",
    r"mkdocs build\b": "docs/test_site.py::test_every_page_is_on_it",
    r"pip install (--dry-run )?\.$": "ci/test_container.py::test_nothing_of_the_image_is_replaced",
    r"(PYTHON=\S+ )?(bash|sbatch) ci/parity/\w+\.": "ci/test_parity_cases.py::test_planted_faults_fail",
    r"bash ci/faults/run\.sh\b": "ci/test_faults.py::test_an_unknown_fault_is_refused",
    r"python ci/faults/soak\.py\b": "ci/test_faults.py::test_a_leak_is_found",
    r"ci/gpu/pack\.sh\b": "ci/test_gpu_pack.py::test_a_kernel_is_found_in_another_folder_by_another_install",
    r"ci/gpu/check\.sh\b": "ci/test_gpu_check.py::test_everything_runs_with_torch_and_triton_alone",
    r"python3? ci/gpu/report\.py page": "ci/test_gpu_check.py::test_pages_say_what_their_files_say",
    r"python tests/equipment/cuda/budget\.py": "fake_cuda/test_budget.py::test_budget",
    r"python docs/generate\.py": "docs/test_docs.py::test_the_pages_are_what_the_code_gives_now",
    r"git apply .*patches/megatron-lm/": "ci/test_patches.py::test_it_applies_to_the_installed_megatron",
    r"torchrun .*--no-python cp-plugin calibrate": (
        "planner/test_calibrate.py::test_the_command_writes_what_it_measured"
    ),
    r"([A-Z_]+=\S+ )*bash train\.sh\b": "tools/test_examples_scripts.py::test_a_node_starts_its_ranks",
    r"sbatch --nodes \d+ --gpus-per-node \d+ examples/launch\.sbatch\b": (
        "tools/test_examples_scripts.py::test_the_launcher_starts_the_ranks_of_the_example_that_is_named"
    ),
    r"torchrun .* pretrain_hybrid\.py": "megatron/runs/test_checkout.py::test_losses_are_those_of_one_rank",
    r"cp-plugin dataset ": "tools/test_dataset.py::test_the_command_prints_the_flags_and_the_description_has_them",
    r"cp-plugin plan --reproduce all": (
        "planner/test_papers.py::test_the_command_prints_the_summary_last_and_says_whether_it_passes"
    ),
}
"""Pattern of a command -> the test, below ``tests``, that runs it or a smaller form of it."""
GATHER_Q = "gather_q"
_FOREIGN = ("srun", "torchrun", "pip", "python", "sbatch")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    """Megatron, imported once for the forked processes that read the flags of a training run."""
    with cpu_mode():
        import megatron.training.training  # noqa: F401

        warm_up()
    yield


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the files that the pages assume: a training script, a cluster profile, document
    lengths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('a training script of Megatron-LM')\n")
    hardware.save(hardware.cluster("dgx-h100"), tmp_path / "mine.toml")
    (tmp_path / "lengths.txt").write_text("60000\n9000\n2000\n500\n")


@nightly
@pytest.mark.parametrize("command", fenced(), ids=lambda command: command.text[:90])
def test_in_a_block(command: Printed, request: pytest.FixtureRequest) -> None:
    if GATHER_Q in command.text:
        request.getfixturevalue("worked_example")
    execute(command)


def whole(command: Printed) -> bool:
    """Return True for a command of ours without placeholders."""
    placeholders = re.search(r"\b[A-Z]{2,}\b|\.\.\.|\[|--help", command.text.replace(FLAGS, ""))
    return bool(command.options) and not placeholders and command.words[0] == "cp-plugin"


FIRST = {command.words[1]: command for command in reversed(inline()) if whole(command)}
"""Subcommand -> the command that every change runs; it parses the others, which ``--all`` runs."""


@pytest.mark.parametrize("command", inline(), ids=lambda command: command.text[:90])
def test_in_line(command: Printed) -> None:
    if not whole(command):
        check_mention(command)
    elif NIGHT or command == FIRST[command.words[1]]:
        execute(command)
    else:
        check_arguments(command)


@pytest.mark.parametrize("pattern", COVERED)
def test_the_tests_that_are_named_exist(pattern: str) -> None:
    path, _, name = COVERED[pattern].partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_scripts_run_what_they_say() -> None:
    for name in {command.words[0] for command in fenced() if not command.script}:
        assert not name.endswith(".sh") or os.access(ROOT / name, os.X_OK), f"{name} is printed, and not executable"
    text = (ROOT / "ci" / "test.sh").read_text()
    trainer = "ci/huggingface.sh tests/huggingface/test_trainer.py -k example"
    for line in ("ruff format --check .", "ruff check .", "lint-imports", 'pytest "$@"', trainer):
        assert line in text
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert all(f"/{line}" in hooks for line in ("ruff format", "ruff check", "lint-imports"))


def execute(command: Printed) -> None:
    """Run a command; AssertionError if it fails or is unknown.

    ValueError for a training run whose flags are refused.
    """
    covered = any(re.match(pattern, command.text) for pattern in COVERED)
    known = next((how for pattern, how in HOW.items() if re.match(pattern, command.text)), None)
    assert covered or known, f"{command.page} prints {command.text!r}: nothing here runs it"
    if covered and command.words[0] == "cp-plugin":
        check_arguments(command)
    if known and not covered:
        known(command)


def _cp_plugin(command: Printed) -> None:
    words = _with_flags(command.words[1:])
    for pattern, options in SMALLER.items():
        if re.match(pattern, command.text):
            words[1:1] = [word for pair in _pairs(options) if pair[0] not in command.options for word in pair]
    result = cp_plugin(*words)
    assert result.exit_code == 0, f"{command.page}: {command.text}\n{result.output}"


def _torchrun(command: Printed) -> None:
    from torch.distributed.run import get_args_parser

    first = command.words.index("torchrun") + 1  # behind what is set in the environment
    words = [word for word in _with_flags(command.words[first:]) if word != "..."]
    parsed = get_args_parser().parse_args(words)
    devices = int(parsed.nnodes.rpartition(":")[2]) * int(parsed.nproc_per_node)
    if not parsed.module:
        assert Path(parsed.training_script).is_file(), parsed.training_script
        planned.question(parsed.training_script_args, devices)
    else:
        _module(parsed.training_script, parsed.training_script_args, devices)


def _python(command: Printed) -> None:
    _, _, module, *words = _with_flags([word for word in command.words if word != "srun"])
    nproc, _ = split_nproc(words)
    _module(module, words, nproc or (8 if command.words[0] == "srun" else 1))


def _module(module: str, words: list[str], devices: int) -> None:
    assert module in ("cp_plugin.run", "cp_plugin.pretrain_gpt"), module
    _, flags = run.split(words) if module == "cp_plugin.run" else split_nproc(words)
    planned.question(flags, devices)


def _flags(command: Printed) -> None:
    planned.question([*TRAINING, "--cp-provider", "ring", *(word for word in command.words if word != "...")], 8)


def _script(command: Printed) -> None:
    """Run a Slurm script under bash with fake programs, and parse the flags of what it starts."""
    stubs = Path("stubs")
    stubs.mkdir()
    for name, body in {
        "srun": 'exec "$@"',
        "scontrol": 'echo node0 && test "$1 $2 $3" = "show hostnames node[0-7]"',
        "torchrun": 'printf "%s\\n" torchrun "$@" > started',
    }.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-7]", "SLURM_JOB_NUM_NODES": "8", "SLURM_NODEID": "0"}
    env = {**os.environ, **slurm, "PATH": f"{stubs.resolve()}:{os.environ['PATH']}"}
    Path("train.sbatch").write_text(command.text)
    subprocess.run(["bash", "-euo", "pipefail", "train.sbatch"], check=True, env=env)
    started = Path("started").read_text().split()
    assert started[started.index("--master-addr") + 1] == "node0"
    _torchrun(Printed(page=command.page, text=" ".join(started)))


def _pip(command: Printed) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = re.findall(r"(?:cp-plugin|\.)\[([\w,]+)\]", command.text)
    assert names and set(names[0].split(",")) <= set(extras), command.text


def _path_exists(command: Printed) -> None:
    paths = [word for word in command.words if word.startswith(("tests/", "examples/", "docs/", "ci/"))]
    assert all((ROOT / path.partition("::")[0]).exists() for path in paths), command.text


HOW: dict[str, Callable[[Printed], None]] = {
    r"#!": _script,
    r"cp-plugin ": _cp_plugin,
    r"([A-Z_]+=\S+ )?torchrun ": _torchrun,
    r"(srun )?python -m cp_plugin\.(run|pretrain_gpt) ": _python,
    r"(\.\.\. )?--": _flags,
    r"pip install ": _pip,
    r"(cd|python -m pytest|source \.venv/bin/activate)\b": _path_exists,
}
"""Pattern of a command -> how to run it."""


def check_arguments(command: Printed) -> None:
    """AssertionError or a click error for a command of ``cp-plugin`` that does not parse as printed."""
    _, name, *words = command.words
    own = words[: words.index("--")] if "--" in words else words
    context = typer.main.get_command(app).commands[name].make_context(name, own)  # type: ignore[attr-defined]
    extra = context.args[:1]  # flags of Megatron, where the command takes them
    assert not extra or extra[0].startswith("--"), f"{command.page} prints {command.text!r}: {extra[0]} is no argument"


def check_mention(command: Printed) -> None:
    """AssertionError for a command, option, module or script that does not exist."""
    name, *words = command.words if "'" not in command.text else command.text.split()
    if name == "cp-plugin":
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        if words and words[0] != "COMMAND":
            assert words[0] in commands, command.text
            own = command.options[: command.words.index("--")] if "--" in command.words else command.options
            known = {word for one in commands[words[0]].load().params for word in (*one.opts, *one.secondary_opts)}
            assert set(own) <= known | {"--help"}, command.text
    elif words[:1] == ["-m"] and name in _FOREIGN:
        assert importlib.util.find_spec(words[1]) is not None, command.text
    elif name in _FOREIGN and not (words and words[0].endswith(".py")):
        assert name != "pip" or words[0] in ("show", "install", "uninstall", "wheel"), command.text
    else:
        assert (ROOT / (words[0] if name in _FOREIGN else name)).is_file(), command.text


def _with_flags(words: list[str]) -> list[str]:
    return [flag for word in words for flag in (TRAINING if word == FLAGS else [word])]


def _pairs(options: str) -> list[list[str]]:
    """``--dtype float32 --decode`` -> [[--dtype, float32], [--decode]]."""
    return [part.split() for part in re.split(r" (?=--)", options)] if options else []


@pytest.fixture
def worked_example(tmp_path: Path) -> Iterator[None]:
    """Installs the provider of the page on adding a method."""
    source = (ROOT / "docs" / "methods" / "gather_q.py").read_text()
    with third_party.installed(tmp_path, GATHER_Q, source, providers.ENTRY_POINTS, gather_q="PROVIDER"):
        yield
