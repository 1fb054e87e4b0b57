"""Generated command lines, flags and profiles: no mistake of a user's may end in a traceback, and what is accepted must
be read back as it was written.

    python ci/faults/fuzz_inputs.py --examples 300          continuous integration
    python ci/faults/fuzz_inputs.py --examples 100000       every night

Ends with 1 and the shortest example that hypothesis finds. Three inputs in equal parts: commands of `cp-plugin` (called
in this process), the plugin's flags of a Megatron training, and hardware profiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cp_plugin import providers
from cp_plugin.cli import app as commands

NUMBERS = st.one_of(
    st.integers(-2, 70).map(str),
    st.sampled_from(
        ["0", "-1", "1e3", "2.5", "", " ", "auto", "none", "4x", "2x4", "0x2", "04x2", "¾", "9" * 30, "nan"]
    ),
    st.text(max_size=4),
)
NAMES = st.one_of(st.sampled_from([*providers.names(), "auto", "upstream", "rng", "RING", ""]), st.text(max_size=6))
GRIDS = st.one_of(st.sampled_from(["2x2", "1x4", "4x1", "2X2", "2x", "x2", "2x2x2", "-1x-4"]), NUMBERS)
COMMAND_FLAGS: dict[str, st.SearchStrategy[str]] = {
    "--size": st.integers(-1, 16).map(str),
    "--heads": NUMBERS,
    "--kv-heads": NUMBERS,
    "--head-dim": NUMBERS,
    "--seq-length": NUMBERS,
    "--batch": NUMBERS,
    "--dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8", ""]),
    "--grid": GRIDS,
    "--head-parallel": NUMBERS,
    "--intra-size": NUMBERS,
    "--head-groups": NUMBERS,
    "--backward": NAMES,
    "--fp8": NAMES,
    "--decay": NAMES,
}
TRAINING_FLAGS: dict[str, st.SearchStrategy[str]] = {
    "--cp-provider": NAMES,
    "--cp-layout": st.one_of(st.sampled_from(["zigzag", "striped", "contiguous"]), NAMES),
    "--cp-grid": GRIDS,
    "--cp-head-parallel": NUMBERS,
    "--cp-intra-size": NUMBERS,
    "--cp-head-groups": NUMBERS,
    "--cp-backward": NAMES,
    "--cp-fp8": st.one_of(st.sampled_from(["off", "payload", "compute"]), NAMES),
    "--cp-backend": NAMES,
    "--cp-selfcheck": NAMES,
    "--cp-device": NAMES,
    "--cp-linear-attention": NAMES,
    "--cp-layer-pattern": st.text("LN lx", max_size=5),
}


class Found(Exception):
    """A traceback, or a wrong acceptance."""


def words(flags: dict[str, st.SearchStrategy[str]]) -> st.SearchStrategy[dict[str, str]]:
    return st.lists(st.sampled_from(sorted(flags)), unique=True, max_size=6).flatmap(
        lambda names: st.fixed_dictionaries({name: flags[name] for name in names})
    )


def command(values: dict[str, str], provider: str) -> None:
    """`cp-plugin traffic` refuses with status 2 and one line, or says the problem that was asked for."""
    line = ["traffic", provider, "--json", *(f"{name}={value}" for name, value in values.items())]
    ended = CliRunner().invoke(commands, line)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        trace = "".join(traceback.format_exception(ended.exception))
        raise Found(f"cp-plugin {line}: {trace}")
    if ended.exit_code not in (0, 1, 2):
        raise Found(f"cp-plugin {line}: status {ended.exit_code}")
    if ended.exit_code == 0:
        problem = json.loads(ended.stdout)["problem"]
        for flag, field in (("--size", "size"), ("--heads", "heads"), ("--kv-heads", "kv_heads"), ("--batch", "batch")):
            if flag in values and str(problem[field]) != values[flag].strip():
                raise Found(f"cp-plugin {line}: {flag} was read as {problem[field]}")


def training(values: dict[str, str], size: int) -> None:
    """The plugin's flags are refused with a ValueError, or read as they were written."""
    from cp_plugin.megatron import args, option_flags

    parser = args.add_arguments(argparse.ArgumentParser(exit_on_error=False))
    line = [f"{name}={value}" for name, value in values.items()]
    try:
        parsed = parser.parse_args(line)
        parsed.context_parallel_size = size
        parsed.num_layers, parsed.recompute_granularity, parsed.hybrid_layer_pattern = 4, None, None
        read = args.settings_from(parsed)
    except (ValueError, argparse.ArgumentError, SystemExit):
        return
    except Exception:
        raise Found(f"{line} with --context-parallel-size {size}: {traceback.format_exc()}") from None
    shown = option_flags.shown(read.options)
    wrong = {n: shown[n] for n in values.keys() & shown.keys() if values[n] not in ("auto", "off", "none", shown[n])}
    if wrong:
        raise Found(f"{line} with --context-parallel-size {size}: read as {wrong}")


def profile(base: dict[str, Any], kind: type, changes: list[tuple[int, Any]], folder: Path) -> None:
    """A changed profile is refused with a ValueError, or holds what is written, and is written as it was read."""
    from cp_plugin.planner import profile_files

    table = copy.deepcopy(base)
    for which, value in changes:
        _put(table, which, value)
    path = folder / "profile.toml"
    try:
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
    except (TypeError, ValueError):
        return
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        read = profile_files.parse(path, kind)
    except ValueError:
        return
    except Exception:
        raise Found(f"{path.read_text()}\n{traceback.format_exc()}") from None
    held = read.model_dump()
    wrong = {key: (value, held.get(key)) for key, value in written.items() if not _same(value, held.get(key))}
    again = folder / "again.toml"
    again.write_text(profile_files.as_toml(read), encoding="utf-8")
    if wrong or profile_files.parse(again, kind) != read:
        raise Found(f"{path.read_text()}\nread as {wrong}")


def _put(table: dict[str, Any], which: int, value: Any) -> None:
    keys = sorted(table)
    key = keys[which % len(keys)]
    if isinstance(table[key], dict) and table[key] and which % 3:
        _put(table[key], which // len(keys), value)
    elif value is None:
        del table[key]
    else:
        table[key] = value


def _same(written: Any, held: Any) -> bool:
    if isinstance(written, dict) and isinstance(held, dict):
        return all(_same(value, held.get(key)) for key, value in written.items())
    if isinstance(written, list) and isinstance(held, list | tuple):
        return len(written) == len(held) and all(map(_same, written, held))
    return written == held and isinstance(written, bool) == isinstance(held, bool)


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
)


def fuzz(examples: int) -> list[str]:
    """Try about so many inputs; a text for each kind of input in which something was found."""
    from cp_plugin.planner import hardware

    each = settings(
        max_examples=-(-examples // 3),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    devices = Path(hardware.__file__).parent / "profiles" / "devices"
    base = tomllib.loads(sorted(devices.glob("*.toml"))[0].read_text())
    found = []
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], None]] = {
            "commands": each(given(words(COMMAND_FLAGS), NAMES)(command)),
            "training flags": each(given(words(TRAINING_FLAGS), st.integers(1, 16))(training)),
            "profiles": each(
                given(st.lists(st.tuples(st.integers(0, 10**6), VALUES), max_size=3))(
                    lambda changes: profile(base, hardware.Device, changes, Path(folder))
                )
            ),
        }
        for name, part in parts.items():
            try:
                part()
                print(f"{name}: nothing found", flush=True)
            except Found as error:
                found.append(f"{name}: {error}")
    return found


def main(examples: Annotated[int, typer.Option(min=3, help="inputs to try")] = 300) -> None:
    found = fuzz(examples)
    for text in found:
        print(f"FOUND in {text}", file=sys.stderr)
    print(f"{examples} inputs: {len(found)} kinds of input with a traceback or a wrong acceptance")
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    from cp_plugin.megatron import activate

    activate(["--cp-device", "cpu"])
    typer.run(main)
