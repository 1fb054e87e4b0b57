"""Flags of trainings: the plugin's, Megatron's as the planner reads them, and the launching of ranks."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fuzz_words import (
    LAYOUTS,
    ODD,
    OPTIONS,
    PROVIDERS,
    Found,
    Kind,
    Outcome,
    Stopped,
    names,
    numbers,
    spelled,
    stopped_at,
    words,
)
from hypothesis import strategies as st

TRAINING: dict[str, st.SearchStrategy[str | None]] = {
    "--cp-provider": PROVIDERS,
    "--cp-layout": LAYOUTS,
    **{f"--cp{flag[1:]}": values for flag, values in OPTIONS.items()},
    "--cp-backend": names("auto", "sdpa", "reference", "triton"),
    "--cp-selfcheck": names("once", "off"),
    "--cp-check-every": st.sampled_from(["0", "1", "100", "-1", "1.5", "often"]),
    "--cp-pad-sequence": st.none(),
    "--cp-device": names("auto", "cpu", "cuda"),
    "--cp-cluster": names("dgx-h100", "none.toml"),
    "--cp-linear-attention": names("basic", "gla", "based"),
    "--cp-linear-provider": names("lasp2", "lasp1", "zeco", "linear_ring"),
    "--cp-layer-pattern": st.one_of(st.sampled_from(["L", "LLLN", "N"]), st.text("LN lx", max_size=5)),
}
"""Flags of the plugin with their usual values; ``declared`` adds the rest."""
SWITCH = st.none()
PATTERN = "--hybrid-layer-pattern"
MEGATRON: dict[str, st.SearchStrategy[str | None]] = {
    **{f"--cp-{name}": TRAINING[f"--cp-{name}"] for name in ("provider", "layout", "grid", "head-parallel", "backend")},
    **{f"--cp-{name}": TRAINING[f"--cp-{name}"] for name in ("pad-sequence", "linear-attention", "layer-pattern")},
    "--num-layers": numbers(2, 4),
    "--hidden-size": numbers(64, 128),
    "--num-attention-heads": numbers(4, 8),
    "--num-query-groups": numbers(2, 4),
    "--kv-channels": numbers(16, 32),
    "--ffn-hidden-size": numbers(128),
    "--seq-length": numbers(128, 1000, 1024),
    "--max-position-embeddings": numbers(128, 1024),
    "--micro-batch-size": numbers(1, 2),
    "--global-batch-size": numbers(2, 8),
    "--context-parallel-size": numbers(2, 4),
    "--tensor-model-parallel-size": numbers(1, 2),
    "--pipeline-model-parallel-size": numbers(1, 2),
    "--num-experts": numbers(2, 4),
    "--moe-router-topk": numbers(1, 2),
    "--expert-model-parallel-size": numbers(1, 2),
    "--vocab-size": numbers(256, 1000),
    "--recompute-granularity": names("full", "selective"),
    "--recompute-num-layers": numbers(1, 2),
    "--window-size": st.sampled_from(["(4,0)", "4,0", "(4", "x", ""]),
    "--lr": st.one_of(st.sampled_from(["1e-4", "nan", "-1"]), st.sampled_from(ODD)),
    **dict.fromkeys(("--dataloader-inter-document-masking", "--sft", "--eod-mask-loss"), SWITCH),
    "--calculate-per-token-loss": SWITCH,
    "--mtp-num-layers": numbers(1, 2),
    PATTERN: st.one_of(st.sampled_from(["M*-M*-", "*-", "M*E/M*", "M*|GM*-"]), st.text("M*G-E+D/|x", max_size=6)),
    "--yaml-cfg": st.just("x.yaml"),
    "--unknown-flag": numbers(1),
}
_BASE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --vocab-size 256 --tokenizer-type NullTokenizer --context-parallel-size 2 --cp-provider ring "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 1 --lr 1e-4"
)
BASE = dict(zip(_BASE.split()[::2], _BASE.split()[1::2], strict=True))


def declared() -> dict[str, st.SearchStrategy[Any]]:
    """Every flag of the plugin's parser, with values to try."""
    found: dict[str, st.SearchStrategy[Any]] = dict(TRAINING)
    for action in _parser()._actions:
        values = names(*map(str, action.choices)) if action.choices else numbers(1, 2, 4)
        for flag in action.option_strings:
            if flag.startswith("--cp-"):
                found.setdefault(flag, SWITCH if action.nargs == 0 else values)
    return found


def training(values: Mapping[str, str | None], size: int) -> Outcome:
    """The plugin's flags: refused with a ValueError, or read as written."""
    from cp_plugin.megatron.flags import args, option_flags

    parsed = argparse.Namespace(**vars(_defaults()))
    line = spelled(values)
    try:
        parsed = _parser().parse_args(line, parsed)
        parsed.context_parallel_size = size
        parsed.num_layers, parsed.recompute_granularity, parsed.hybrid_layer_pattern = 4, None, None
        read = args.settings_from(parsed)
    except (ValueError, argparse.ArgumentError, SystemExit):
        return "refused"
    except Exception:
        raise Found(f"{line} with --context-parallel-size {size}: {traceback.format_exc()}") from None
    shown = option_flags.shown(read.options)
    wrong = {n: shown[n] for n in values.keys() & shown.keys() if values[n] not in ("auto", "off", "none", shown[n])}
    asked = values.get("--cp-provider", read.provider)
    if asked != read.provider or (read.active and (values.get("--cp-selfcheck") == "off") == read.selfcheck):
        wrong["--cp-provider"] = read.provider
    if read.active and read.pad_sequence != ("--cp-pad-sequence" in values):
        wrong["--cp-pad-sequence"] = read.pad_sequence
    if read.active and values.get("--cp-check-every", "0") != str(read.check_every):
        wrong["--cp-check-every"] = read.check_every
    if wrong:
        raise Found(f"{line} with --context-parallel-size {size}: read as {wrong}")
    return "accepted"


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from cp_plugin.megatron.flags import args

    return args.add_arguments(argparse.ArgumentParser(exit_on_error=False))


@functools.cache
def _defaults() -> argparse.Namespace:
    return _parser().parse_args([])


def megatron(values: Mapping[str, str | None], devices: int) -> Outcome:
    """A training's flags after ``cp-plugin plan --``: refused by Megatron or us, or read as written."""
    from cp_plugin.megatron.planned import command as planned

    given = BASE | dict(values)
    if PATTERN in given:  # says how many layers there are
        del given["--num-layers"]
    line = [word for flag, value in given.items() for word in (flag, value) if word is not None]
    try:
        with in_this_process():
            read = planned.read(line, devices)
    except ValueError as error:
        if len(str(error)) < 3 or "Traceback" in str(error):
            raise Found(f"{line} on {devices}: refused without a reason: {error}") from None
        return "refused"
    except Exception:
        raise Found(f"{line} on {devices}: {traceback.format_exc()}") from None
    pairs = {
        "--num-layers": read.model.layers,
        "--hidden-size": read.model.hidden,
        "--num-attention-heads": read.model.heads,
        "--seq-length": read.parallel.seq_length,
        "--context-parallel-size": read.parallel.context,
        "--micro-batch-size": read.parallel.micro_batch,
        "--vocab-size": read.model.vocab,
    }
    added = {flag: held - int(given[flag]) for flag, held in pairs.items() if flag in given}
    if "--cp-pad-sequence" in given:  # up to a multiple that every layout divides
        added["--seq-length"] //= 2 * read.parallel.context * read.parallel.tensor
    if wrong := {flag: held for flag, held in pairs.items() if added.get(flag, 0) != 0 or held < 1}:
        raise Found(f"{line} on {devices}: read as {wrong}")
    return "accepted"


@contextmanager
def in_this_process() -> Iterator[None]:
    """Run in this process what the planner runs in a fork, and undo its side effects."""
    with patch("cp_plugin.megatron.planned.command.run_ranks", _here):
        yield


def _here(
    function: Callable[..., Any], ranks: int, *, args: Sequence[Any], env: Mapping[str, str], timeout: float
) -> Any:
    error, words, environment = os.dup(2), sys.argv, dict(os.environ)
    os.environ |= env
    try:
        with patch("torch.cuda.device_count", lambda: 1):
            return [function(*args)]
    finally:
        os.dup2(error, 2)
        os.close(error)
        sys.argv = words
        os.environ.clear()
        os.environ.update(environment)


def prepare() -> None:
    """Import Megatron once, and cache the sources that its parser reads."""
    from cp_plugin.megatron import activate

    activate(["--cp-device", "cpu"])
    inspect.getsource = functools.cache(inspect.getsource)


def launching(line: list[str]) -> Outcome:
    """``python -m cp_plugin.run``: the requested number of ranks of the script, or a ValueError."""
    from cp_plugin import run

    with (
        stopped_at("cp_plugin.testing.launch.run_ranks") as begin,
        patch("cp_plugin.run._preload"),
        patch("cp_plugin.run._run_script"),
    ):
        try:
            status = run.main(line)
        except Stopped:
            asked, size = line[0].partition("=")[2] or line[1], begin.call_args.args[1]
            if int(asked) != size or size < 1:
                raise Found(f"{line}: {size} ranks") from None
            return "accepted"
        except ValueError as error:
            if not str(error):
                raise Found(f"{line}: refused without a reason") from None
            return "refused"
        except Exception:
            raise Found(f"{line}: {traceback.format_exc()}") from None
    return "accepted" if not status else "refused"


def kinds() -> list[Kind]:
    script = st.lists(
        st.one_of(
            st.sampled_from(["--nproc", "--nproc=2", "2", __file__, "none.py", "--cp-provider", "--nproc=0"]),
            numbers(2).map(lambda n: f"--nproc={n}"),
        ),
        min_size=1,
        max_size=3,
    )
    return [
        Kind("training flags", 16, training, (words(declared()), st.integers(1, 16))),
        Kind("Megatron's flags", 2, megatron, (words(MEGATRON, 3), st.integers(0, 9))),
        Kind("launching", 3, launching, (script,)),
    ]
