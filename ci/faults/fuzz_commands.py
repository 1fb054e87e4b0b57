"""Command lines of ``cp-plugin``: each subcommand up to the point where it would start ranks, draw, or train."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fuzz_words import (
    DTYPES,
    GRIDS,
    LAYOUTS,
    OPTIONS,
    PROVIDERS,
    Found,
    Kind,
    Outcome,
    call,
    declared_flags,
    names,
    numbers,
    same_numbers,
    same_options,
    spelled,
    stopped_at,
    words,
)
from hypothesis import strategies as st

USUAL = {
    **OPTIONS,
    "--heads": numbers(1, 4, 8, 32),
    "--kv-heads": numbers(1, 2, 4, 8),
    "--head-dim": numbers(16, 64, 128),
    "--v-head-dim": numbers(0, 16, 128),
    "--batch": numbers(1, 2),
    "--seq-length": numbers(64, 512, 1024, 8192, 131072),
    "--ranks": numbers(1, 2, 4, 8, 16),
    "--provider": PROVIDERS,
    "--layout": LAYOUTS,
    "--dtype": DTYPES,
    "--decay": names("none", "head", "token", "key"),
    "--backend": names("auto", "sdpa", "reference", "cudnn", "flash", "te", "triton"),
    "--device": names("auto", "cpu", "cuda"),
    "--mask": names("full", "causal", "full-window", "causal-window", "full-document", "share-question"),
    "--window": numbers(1, 16, 1024),
    "--distribution": names("pile", "prolong64k"),
    "--seed": numbers(0, 1),
    "--rounds": numbers(1, 5),
    "--timeout": st.one_of(numbers(60, 3600), st.sampled_from(["1e3", "0.5", "inf", "-inf", "1e400"])),
    "--plot": names("x.svg", "x.gif", "/none/x.svg"),
    "--devices": st.sampled_from("124"),
    "--tensor": numbers(1, 2),
    "--pipeline": numbers(1, 2),
    "--context": numbers(1, 2, 4),
    "--recompute": names("none", "selective", "full"),
    "--global-batch": numbers(1, 2, 8),
    "--per-node": numbers(4, 8),
    "--nics": numbers(1, 8),
    "--memory": st.one_of(numbers(40, 80), st.sampled_from(["1e3", "-5", "inf", "1e-300", "0.0"])),
    "--tokenizer": names("bytes", "bytes:x", "huggingface:none", "sentencepiece:x", "tiktoken:"),
    "--suffix": names(".txt", ".txt,.md", "txt", ".gz", ".jsonl"),
    "--json-key": names("text", "x"),
    "--vocab-size": numbers(256, 257, 1000),
    "--max-bytes": numbers(1, 100),
    "--workers": numbers(1, 2),
}
"""Values of the flags of all commands."""
CONTESTANTS = st.one_of(
    PROVIDERS,
    st.sampled_from(["attention2d:grid=2x2", "ring:layout=zigzag", "torch-ring:hops=p2p", "te-p2p", "burst:"]),
    st.tuples(PROVIDERS, st.sampled_from(["grid", "head_parallel", "fp8", "gradient_dtype", "layout", "x"]), GRIDS).map(
        lambda parts: f"{parts[0]}:{parts[1]}={parts[2]}"
    ),
)
SEARCHED = 16
MODELS = names("llama3.2-1b", "striped-1b", "linear-llama3-1b", "gpt3-760m", "llama3-1b")


def flags_of(command: str, **others: st.SearchStrategy[str]) -> dict[str, st.SearchStrategy[str]]:
    """The flags of a command that ``USUAL`` knows, and others with values of their own."""
    found = {flag: USUAL[flag] for flag in declared_flags(command) if flag in USUAL}
    return found | {f"--{name}": values for name, values in others.items()}


def traffic(flags: dict[str, str], measure: bool) -> Outcome:
    """The requested problem, with options as written."""
    line = ["traffic", "--json", *["--measure"] * measure, *spelled(flags)]
    with stopped_at("cp_plugin.testing.traffic.run_ranks"):
        ended = call(line)
    if ended.outcome == "accepted" and not ended.stopped:
        told = json.loads(ended.out)
        same_numbers(
            line,
            flags,
            told["problem"] | {"ranks": told["problem"]["size"]},
            ("ranks", "heads", "kv_heads", "head_dim", "seq_length", "batch"),
        )
        for row in told["rows"]:
            same_options(line, flags, row["chosen"] | {"grid": _grid(row["chosen"].get("grid"))})
    return ended.outcome


def verify(flags: dict[str, str]) -> Outcome:
    """Ranks would start with the requested problems and options."""
    line = ["verify", "--json", *spelled(flags)]
    with patch("cp_plugin.testing.verify.make_case"), stopped_at("cp_plugin.testing.verify.on_ranks") as begin:
        ended = call(line)
    for setup in begin.call_args.args[0] if ended.stopped else ():
        same_numbers(line, flags, _fields(setup.problem), ("ranks", "heads", "kv_heads", "seq_length", "batch"))
        same_options(line, flags, setup.options.chosen | {"grid": _grid(setup.options.grid)})
    return ended.outcome


def bench(flags: dict[str, str]) -> Outcome:
    """Ranks would start with the requested cases."""
    line = ["bench", *spelled(flags)]
    with stopped_at("cp_plugin.cli.bench.run.bench") as begin:
        ended = call(line)
    if ended.stopped:
        plans, _, rounds, timeout, *_ = begin.call_args.args
        same_numbers(line, flags, {"rounds": rounds}, ("rounds",))
        if not 1 <= timeout < float("inf"):
            raise Found(f"cp-plugin {line}: a timeout of {timeout}")
        for plan in plans:
            held = _fields(plan.case.problem)
            same_numbers(line, flags, held, ("ranks", "heads", "kv_heads", "head_dim", "seq_length", "batch"))
    return ended.outcome


def calibrate(flags: dict[str, str], out: str) -> Outcome:
    """The requested number of ranks would start."""
    line = ["calibrate", out, *spelled(flags)]
    with stopped_at("cp_plugin.testing.ranks.run_ranks") as begin:
        ended = call(line)
    if ended.stopped:
        (_, size), timeout = begin.call_args.args, begin.call_args.kwargs["timeout"]
        same_numbers(line, flags, {"ranks": size}, ("ranks",))
        if not 1 <= timeout < float("inf"):
            raise Found(f"cp-plugin {line}: a timeout of {timeout}")
    return ended.outcome


def draw(flags: dict[str, str], switches: list[str], path: str) -> Outcome:
    """A picture would be drawn."""
    with ExitStack() as inside:
        for picture in ("method", "layouts", "traffic"):
            inside.enter_context(stopped_at(f"cp_plugin.cli.draw.{picture}.new_figure"))
        inside.enter_context(contextlib.chdir(inside.enter_context(tempfile.TemporaryDirectory())))
        return call(["draw", "--plot", path, *switches, *spelled(flags)]).outcome


def plan(model: str, flags: dict[str, str], wholly: int) -> Outcome:
    """A search over the requested ways to divide the model; one in ``SEARCHED`` is carried out."""
    line = ["plan", f"--model={model}", "--cluster=dgx-h100", "--json", *spelled(flags)]
    with stopped_at("cp_plugin.planner.search.plan") if wholly else contextlib.nullcontext() as begin:
        ended = call(line)
    if ended.stopped:
        (_, shapes, cluster), limit = begin.call_args.args, begin.call_args.kwargs["limit"]
        _same_shapes(line, flags, [asdict(shape) for shape in shapes])
        same_numbers(line, flags, {"per_node": cluster.per_node, "nics": cluster.nics}, ("per_node", "nics"))
        if not 0 < limit < float("inf"):
            raise Found(f"cp-plugin {line}: memory {limit}")
    elif ended.outcome == "accepted":
        _same_shapes(line, flags, json.loads(ended.out)["methods"])
    return ended.outcome


def explain(model: str, flags: dict[str, str], wholly: int) -> Outcome:
    """The requested way to divide the model; one in ``SEARCHED`` is simulated."""
    line = ["plan", "--explain", f"--model={model}", "--cluster=dgx-h100", "--json", *spelled(flags)]
    with stopped_at("cp_plugin.planner.explain.explain") if wholly else contextlib.nullcontext() as begin:
        ended = call(line)
    if ended.outcome == "accepted":
        held = asdict(begin.call_args.args[1]) if ended.stopped else json.loads(ended.out)["parallel"]
        _same_shapes(line, flags, [held])
    return ended.outcome


def dataset(flags: dict[str, str], switches: list[str], texts: dict[str, bytes]) -> Outcome:
    """A dataset would be built from these files."""
    with tempfile.TemporaryDirectory() as folder, stopped_at("cp_plugin.megatron.dataset.build._in_order") as begin:
        for name, content in texts.items():
            (Path(folder) / name).write_bytes(content)
        line = ["dataset", f"{folder}/out", folder, *switches, *spelled(flags)]
        ended = call(line)
    if ended.stopped and "--max-bytes" in flags:
        same_numbers(line, flags, {"max_bytes": begin.call_args.args[0].recipe.max_bytes}, ("max_bytes",))
    return ended.outcome


def _same_shapes(line: list[str], flags: Mapping[str, str], shapes: list[dict[str, Any]]) -> None:
    for shape in shapes:
        known = [name for name in ("tensor", "pipeline", "context", "seq_length", "global_batch") if name in shape]
        total = {"devices": shape["tensor"] * shape["pipeline"] * shape["context"] * shape.get("data", 1)}
        same_numbers(line, flags, shape | {"devices": shape.get("devices", total["devices"])}, ("devices", *known))
        if "--recompute" in flags and shape["recompute"] != flags["--recompute"].strip().lower():
            raise Found(f"cp-plugin {line}: recomputation {shape['recompute']}")


def _fields(problem: Any) -> dict[str, Any]:
    names = ("heads", "kv_heads", "head_dim", "seq_length", "batch")
    return {"ranks": problem.size} | {name: getattr(problem, name) for name in names}


def _grid(grid: Sequence[int] | None) -> str | None:
    return None if grid is None else f"{grid[0]}x{grid[1]}"


def kinds() -> list[Kind]:
    wholly = st.integers(0, SEARCHED - 1)
    of_bench = {"provider": CONTESTANTS, "cluster": names("dgx-h100", "dgx-a100", "none.toml"), "json": names("x.json")}
    switches = st.lists(st.sampled_from(["--sent", "--mask=full"]), unique=True)
    files = names("x.svg", "x.png", "x.gif", "none/x.svg", "x")
    texts = st.dictionaries(
        st.sampled_from(["a.txt", "b.jsonl", "c.md", "d.txt.gz"]),
        st.one_of(st.binary(max_size=20), st.sampled_from([b"text", b'{"text": "a"}\n', b'{"x": 1}\n', b"[[[" * 9])),
        max_size=3,
    )
    some = st.lists(st.sampled_from(["--no-append-eod", "--skip-bad", "--fresh", "--json"]), unique=True, max_size=2)
    return [
        Kind("traffic", 16, traffic, (_nearly_always("--provider", flags_of("traffic")), st.booleans())),
        Kind("verify", 2, verify, (_nearly_always("--provider", flags_of("verify")),)),
        Kind("bench", 3, bench, (_nearly_always("--provider", flags_of("bench", **of_bench)),)),
        Kind("calibrate", 3, calibrate, (words(flags_of("calibrate"), 3), _profiles())),
        Kind("draw", 2, draw, (words(flags_of("draw"), 3), switches, files)),
        Kind("plan", 2, plan, (MODELS, _shapes("plan"), wholly)),
        Kind("explain", 2, explain, (MODELS, _shapes("plan"), wholly)),
        Kind("dataset", 3, dataset, (words(flags_of("dataset")), some, texts)),
    ]


def _profiles() -> st.SearchStrategy[str]:
    return st.one_of(*[st.just(f"{tempfile.gettempdir()}/mine.toml")] * 4, names("/none/x.toml", "x.json", "/tmp"))


def _nearly_always(flag: str, flags: Mapping[str, st.SearchStrategy[str]]) -> st.SearchStrategy[dict[str, str]]:
    """Some of the flags, nearly always including one: without it the command tries everything."""
    given = st.fixed_dictionaries({flag: flags[flag]})
    return st.one_of(words(flags, 4), *[st.tuples(given, words(flags, 4)).map(lambda both: both[0] | both[1])] * 7)


def _shapes(command: str) -> st.SearchStrategy[dict[str, str]]:
    """Few devices and a size for each axis, so that a search is short."""
    fixed = st.fixed_dictionaries(
        {"--devices": USUAL["--devices"], "--tensor": st.sampled_from("12"), "--recompute": st.just("full")}
    )
    return st.tuples(fixed, words(flags_of(command), 4)).map(lambda both: both[0] | both[1])
