"""``ci/faults/fuzz_inputs.py`` finds what is planted: tracebacks, wrong acceptances, hangs, refusals without a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm import python

FAULTS = Path(__file__).parents[1] / "ci" / "faults"
PLANTED = {
    "traceback": (
        "fuzz_commands.traffic({'--ranks': '4'}, False)",
        "patch('cp_plugin.testing.traffic.price', lambda *_: 1 / 0)",
        "ZeroDivisionError",
    ),
    "another size": (
        "fuzz_commands.traffic({'--ranks': '4', '--heads': '8'}, False)",
        "patch('cp_plugin.cli.tables.asdict', lambda _: {'size': 4, 'heads': 7})",
        "heads was read as 7",
    ),
    "another option": (
        "fuzz_commands.verify({'--provider': 'attention2d', '--grid': '2x2'})",
        "patch('cp_plugin.core.options.Option.parse', lambda option, text: (1, 4))",
        "--grid was read as 1x4",
    ),
    "a size below 1": (
        "fuzz_commands.calibrate({'--ranks': '3'}, OUT)",
        "patch('cp_plugin.testing.ranks.number_of_ranks', lambda size: 4)",
        "ranks was read as 4",
    ),
    "an endless timeout": (
        "fuzz_commands.bench({'--provider': 'ring', '--timeout': 'inf'})",
        "patch('cp_plugin.cli.flags.check_forked')",
        "a timeout of inf",
    ),
    "zero for left out": (
        "fuzz_commands.plan('llama3.2-1b', {'--devices': '0'}, 1)",
        "patch('cp_plugin.cli.flags.check_sizes')",
        "devices was read as 8",
    ),
    "no name": (
        "fuzz_words.call(['traffic', '--heads=8'])",
        "patch('cp_plugin.core.problem.Problem.__post_init__', side_effect=ValueError('no'))",
        "refused without a name",
    ),
    "a run file": (
        "fuzz_files.example(0, [], [(0, 0, 'x: !!python/object/apply:os.mkdir [CANARY]\\n')])",
        "patch('cp_plugin.common.yaml_files._Loader', yaml.UnsafeLoader)",
        "was executed",
    ),
    "a key twice": (
        "fuzz_files.example(0, [], [(0, 0, 'lengths: [8]\\n')])",
        "patch('cp_plugin.common.yaml_files._Loader', yaml.SafeLoader), patch('fuzz_files._LOADER', First)",
        "was read as",
    ),
    "a profile's figure": (
        "fuzz_files.profile('devices', [], [])",
        "patch('cp_plugin.planner.machine.profile_files.validated', "
        "lambda k, v, w: k.model_validate(v | {'memory_bytes': 1e9}))",
        "read as",
    ),
    "a model without layers": (
        "fuzz_files.model(0, [(3, 0)])",
        "patch('cp_plugin.planner.training.model._check'), patch('cp_plugin.planner.training.model._check_types')",
        "0",
    ),
    "a launch": (
        "fuzz_megatron.launching(['--nproc=3', fuzz_words.__file__])",
        "patch('cp_plugin.testing.launch.split_nproc', lambda argv: (2, argv[1:]))",
        "2 ranks",
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Fault -> message, from one process that also checks the same input without the fault."""
    lines = [
        "import json, sys, tempfile, yaml; from unittest.mock import patch",
        "import fuzz_commands, fuzz_files, fuzz_megatron, fuzz_words",
        "OUT = tempfile.gettempdir() + '/mine.toml'; said = {}",
        "class First(yaml.SafeLoader):",
        "    def construct_mapping(self, node, deep=False):",
        "        node.value = node.value[::-1]; return super().construct_mapping(node, deep)",
    ]
    for name, (call, plant, _) in PLANTED.items():
        lines += [
            f"said[{name!r}] = ''; {call}",
            f"with {plant}:",
            f"    try: said[{name!r}] = 'accepted: ' + {call}",
            f"    except fuzz_words.Found as error: said[{name!r}] = str(error)",
        ]
    lines.append("print(json.dumps(said))")
    ended = python("\n".join(lines), FAULTS)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(found: dict[str, str], name: str) -> None:
    assert PLANTED[name][2] in found[name] and not found[name].startswith("accepted")


def test_hangs_and_idle_inputs_are_found() -> None:
    text = """
import itertools, fuzz_inputs as f, fuzz_words
from unittest.mock import patch
from hypothesis import strategies as st
def endless(_):
    for _ in itertools.count(): pass
kind = lambda check: f.Kind(name='x', share=1, inputs=(st.integers(),), check=check)
with patch('fuzz_inputs.at_most', lambda: fuzz_words.at_most(1)):
    print(f.fuzz(kind(endless), 1)[1])
print(f.fuzz(kind(lambda _: 'refused'), 250)[1])
outcomes, found = f.fuzz(kind(lambda n: 'refused' if n % 2 else 'accepted'), 300)
print(found, outcomes.total())
sizes = f.sizes(100_000, f.kinds())
print(min(sizes.values()), sum(sizes.values()))
import fuzz_megatron as m
m._parser().add_argument('--cp-new', choices=['a'])
print(*sorted(set(m.declared()) - set(m.TRAINING)))
"""
    ended = python(text, FAULTS)
    assert ended.returncode == 0, ended.stderr
    hang, idle, busy, sizes, unlisted = ended.stdout.strip().splitlines()
    assert {"--cp-new", "--cp-verbose"} <= set(unlisted.split()), "flags of the parser are tried without a list"
    assert hang.endswith(": hangs']") and "all 250 inputs were refused: nothing was tested" in idle and busy == "[] 300"
    assert sizes == "2000 100000"


def test_an_unknown_kind_is_refused() -> None:
    text = "import sys, typer, fuzz_inputs; sys.argv[1:] = ['--kind', 'plans']; typer.run(fuzz_inputs.main)"
    ended = python(text, FAULTS)
    assert ended.returncode == 2 and "--kind plans: choose one of" in ended.stderr
