"""Serving prices: bytes against formulas, seconds against hand calculations."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import dropwhile, takewhile

import pytest
import torch
from rich.console import Console
from round_cluster import round_cluster
from typer.testing import CliRunner

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.setups import settled
from cp_plugin.cli.app import app
from cp_plugin.cli.show_answer import print_answer
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.inference import shard, tree
from cp_plugin.linear.variants import feature_dim, variants
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import as_flags
from cp_plugin.planner.errors import KNOWN_ERROR
from cp_plugin.planner.machine.events import Memory, Products
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.serving import cost as inference
from cp_plugin.planner.serving.cost import Asked, decode, memory, prefill, summed
from cp_plugin.planner.serving.search import answer
from cp_plugin.planner.serving.trace import Layer, chunk_program, token
from cp_plugin.planner.trace.timeline import simulate
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel

_CALL = Problem(size=4, heads=8, kv_heads=2, head_dim=16, batch=2)
_LAYER = Layer(problem=_CALL)
_MODEL = Model(name="small", layers=3, hidden=64, heads=8, kv_heads=2, head_dim=16, ffn_hidden=128, vocab=512)


def toy(per_node: int = 1, shared_by: int = 0) -> Cluster:
    """Memory-bound: 1e9 bytes/s for memory and between nodes, ten times that inside nodes."""
    links = {"intra": (1e-6, 1e10), "inter": (1e-3, 1e9)}
    return round_cluster(flops_per_s=1e15, memory_bytes_per_s=1e9, per_node=per_node, shared_by=shared_by, **links)


def asked(
    tokens: int = 256, *, context: int = 4, chunk: int = 0, batch: int = 1, per_node: int = 1, **more: bool
) -> Asked:
    parallel = Parallel(devices=context, context=context, micro_batch=batch, seq_length=tokens)
    return Asked(model=_MODEL, cluster=toy(per_node), parallel=parallel, chunk=chunk, **more)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_bytes_of_a_token_are_those_of_the_formula(size: int) -> None:
    layer = Layer(problem=replace(_CALL, size=size))
    sent = [sum(token(layer, n * size).sent.values()) for n in (2, 40)]
    assert sent[0] == sent[1] == tree.bytes_sent(size, 0, 1, 2, 8, 16)
    assert max(tree.bytes_sent(size, rank, 1, 2, 8, 16) for rank in range(size)) == sent[0], "the first sends most"


def test_a_message_with_more_in_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tree._packed
    monkeypatch.setattr(tree, "_packed", lambda partial: torch.cat((packed(partial), partial.lse.unsqueeze(-1)), -1))
    monkeypatch.setattr(tree, "_unpacked", lambda message: tree.Partial(message[..., :-2], message[..., -1]))
    assert sum(token(_LAYER, 64).sent.values()) > tree.bytes_sent(4, 0, 1, 2, 8, 16)


@pytest.mark.parametrize(
    ("layer", "slot"),
    [
        (_LAYER, 2 * 2 * (16 + 16) * 2),
        (replace(_LAYER, fp8=True), 2 * 2 * (16 + 1 + 16 + 1)),
        (Layer(problem=replace(_CALL, kv_heads=8), kv_rank=24, rope_dim=8), 2 * (24 + 8) * 2),
    ],
    ids=["heads", "fp8", "latent"],
)
def test_cache_bytes_are_those_of_a_session(layer: Layer, slot: int) -> None:
    assert layer.slot() == slot
    assert token(layer, 64).kept == (64 // 4 + 2) * slot  # and two more slots for what is decoded


def test_memory_by_hand() -> None:
    found = memory(asked(256), limit=2e9)
    per_slot = 3 * 2 * (16 + 16) * 2
    assert (found.cache, found.per_token) == (64 * per_slot, per_slot / 4)
    left = 2e9 - found.parameters - inference.RUNTIME
    assert found.longest(4) == int(left / (per_slot / 4)) // 4 * 4
    assert found.longest(4, (1e8, per_slot / 4)) == int((left - 1e8) / (per_slot / 2)) // 4 * 4
    assert replace(found, limit=1e9).longest(4) == 0 and not replace(found, limit=1e9).fits


def test_messages_of_the_tree_by_hand() -> None:
    """Four ranks on two nodes: neighbours first, then over the card that the two of a node share."""
    nbytes = 8 * (16 + 1) * 4
    inside, alone, shared = 1e-6 + nbytes / 1e10, 1e-3 + nbytes / 1e9, 1e-3 + 2 * nbytes / 1e9
    assert decode(asked(per_node=2)).parts["messages"] == pytest.approx(3 * (inside + shared))
    assert decode(asked(per_node=1)).parts["messages"] == pytest.approx(3 * 2 * alone)
    assert decode(asked(per_node=4)).parts["messages"] == pytest.approx(3 * 2 * inside)
    assert decode(asked(context=1)).parts["messages"] == 0
    # three on a node, the fourth alone: in both rounds one pair is slower than that of the first rank
    assert decode(asked(per_node=3)).parts["messages"] == pytest.approx(3 * 2 * (1e-3 + 3 * nbytes / 1e9))
    # three ranks: the third gives the first its part, and is told the result
    assert decode(asked(240, context=3)).parts["messages"] == pytest.approx(3 * 3 * alone)


def test_token_reads_weights_and_cache() -> None:
    one, two = decode(asked(256)), decode(asked(512))
    attention = 64 * (8 * 16 + 2 * 2 * 16 + 8 * 16) + 64
    matrices = attention + 3 * 64 * 128 + 64
    assert one.parts["weights"] == two.parts["weights"] == pytest.approx((3 * matrices + 512 * 64) * 2 / 1e9)
    assert one.read == 3 * 64 * 2 * 32 * 2 / 1e9 and two.read == 2 * one.read
    assert two.parts["attention"] > one.parts["attention"] > one.read
    assert one.sent == two.sent == 3 * tree.bytes_sent(4, 0, 1, 1, 8, 16)
    assert decode(asked(256, batch=2)).sent == 2 * one.sent


def test_long_caches_are_priced_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "ELEMENTS", 8 * 16 * 8)  # blocks of 8 slots
    question = replace(asked(4 * 80), cluster=toy(shared_by=2))
    _, seconds, _ = inference._token_seconds(question.layer("N"), 80, question)
    whole = inference._kernels(token(question.layer("N"), 4 * 80, tiled=True).layer, question)
    assert seconds == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("layer", [_LAYER, replace(_LAYER, fp8=True), replace(_LAYER, kv_rank=32, rope_dim=8)])
def test_gpu_launches_do_not_depend_on_the_cache(layer: Layer) -> None:
    def launches(slots: int) -> int:
        return sum(event.launches for event in token(layer, 4 * slots).layer if isinstance(event, Memory | Products))

    def read(slots: int) -> int:
        return sum(event.nbytes for event in token(layer, 4 * slots).layer if isinstance(event, Memory))

    assert launches(64) == launches(131072)
    assert read(131072) - read(64) == (131072 - 64) * (layer.slot() + 4 * _CALL.batch), "with each slot's position"


@pytest.mark.parametrize("name", providers.names())
def test_chunks_have_all_pairs_and_the_bytes_of_a_forward(name: str) -> None:
    problem = Problem(size=4, heads=8, kv_heads=4, head_dim=16, seq_length=64, batch=1)
    setup = settled(providers.get(name), problem, Options())
    layer = Layer(problem=problem)
    parts = [[chunk_program(setup, layer, rank, before) for rank in range(4)] for before in (0, 1)]
    assert sum(program.pairs() for part in parts for program in part) == 128 * 129 // 2 * 8
    for rank, program in enumerate(parts[0]):
        formula = setup.provider.traffic(problem, setup.options, rank)
        forward = {axis: n for (phase, axis), n in formula.items() if phase == "forward" and n}
        assert {axis: n for (_, axis), n in program.sent.items() if n} == forward, rank
        assert sum(parts[1][rank].sent.values()) >= sum(program.sent.values())


def test_prefill_grows_with_the_prompt() -> None:
    def seconds(question: Asked) -> float:
        problem = Problem(size=4, heads=8, kv_heads=2, head_dim=16, seq_length=question.chunk)
        return prefill(question, settled(providers.get("striped"), problem, Options())).seconds

    assert seconds(asked(256)) < seconds(asked(512)) < seconds(asked(1024))
    assert seconds(asked(512, chunk=256)) > seconds(asked(256))

    assert summed({0: 5.0}) == 5.0, "of chunks, interpolated"
    assert summed({0: 1.0, 4: 9.0, 6: 10.0}) == 1 + 3 + 5 + 7 + 9 + 9.5 + 10


@pytest.mark.parametrize("kind", ["based", "basic", "gla"])
def test_linear_layers_by_hand(kind: str) -> None:
    """A token reads and writes each layer's state, which is as large as a session's; a chunk scans once per layer."""
    hybrid = replace(_MODEL, attention_pattern="LLN", linear=kind, kv_heads=8)
    q, v = torch.ones(2, 1, 8, feature_dim(variants()[kind], 16)), torch.ones(2, 1, 8, 16 + variants()[kind].normalised)
    state = ContextParallel("lasp2").extend_linear(q, q, v)[1]
    query, softmax = (replace(asked(context=1), model=m) for m in (hybrid, replace(hybrid, attention_pattern="N")))
    assert memory(query, 1e9).states == 2 * state.nbytes and memory(softmax, 1e9).states == 0
    assert memory(query, 1e9).per_token == memory(softmax, 1e9).per_token / 3, "one layer of three has a cache"
    found = decode(query)
    assert found.parts["linear"] == pytest.approx(2 * (2 * state.nbytes / 1e9 + query.cluster.device.launch_s))
    assert decode(softmax).parts["linear"] == 0 and found.read == pytest.approx(decode(softmax).read / 3)

    only = replace(asked(512, chunk=256), model=replace(hybrid, attention_pattern="L"))
    whole, (halves,) = answer(replace(only, chunk=512)), answer(only).prefills
    assert halves.setup is None and not whole.cannot and halves.parts["attention"] == halves.sent == 0
    call = replace(only.call("L"), seq_length=256)
    scan = simulate(settled(providers.get("lasp2"), call, Options()), call, cluster=only.cluster).forward_s
    assert halves.parts["linear"] == pytest.approx(3 * 2 * scan) and scan > whole.prefills[0].parts["linear"] / 6


def test_order_of_an_answer() -> None:
    found = answer(asked(256))
    names = [one.setup.provider.name for one in found.prefills if one.setup is not None]
    assert set(names) | set(found.cannot) == set(providers.names()) - {"needed"}  # a prompt has no window here
    tied, slower = found.prefills[: found.tied], found.prefills[found.tied :]
    words = [(len(as_flags(one.setup).split()), one.sent) for one in tied if one.setup is not None]
    assert len(words) == len(tied) and words == sorted(words)
    times = [one.seconds for one in slower]
    assert times == sorted(times) and all(seconds > (1 + KNOWN_ERROR) * found.fastest for seconds in times)
    assert all(one.working[1] > 0 for one in found.prefills)
    with pytest.raises(ValueError, match=r"--seq-length 256: small needs .* no context length fits"):
        answer(asked(256), limit=1e6)


@pytest.mark.parametrize("width", [80, 100])
def test_all_lines_fit_the_terminal(width: int) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    found = answer(asked(1024))
    print_answer(console, found)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = list(takewhile(str.strip, dropwhile(lambda line: not line.startswith("provider "), lines)))[1:]
    assert [row.split()[0] for row in rows] == [p.setup.provider.name for p in found.prefills if p.setup]
    assert max(map(len, lines)) <= width


def test_json() -> None:
    flags = "--model llama3-8b --cluster dgx-h100 --devices 8 --seq-length 16384 --decode --json"
    done = CliRunner().invoke(app, ["plan", *flags.split()])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["decode"]["sent"] == 32 * tree.bytes_sent(8, 0, 1, 1, 32, 128) and found["prefill"] == []
    assert found["memory"]["cache"] == 16384 // 8 * 32 * 8 * 256 * 2
    assert found["decode"]["seconds"] == pytest.approx(sum(found["decode"]["parts"].values()))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--decode --chunk 64", "--chunk 64 has no effect without --prefill"),
        ("--prefill --chunk 40", "--chunk 40: write a multiple of 16"),
        ("--prefill --chunk 96", "--chunk 96: write a divisor of --seq-length 1024"),
        ("--decode --pipeline 2", "--pipeline 2 applies to training"),
        ("--decode --recompute full", "--recompute full applies to training"),
        ("--decode --tensor 3", "--devices 8 is not --tensor 3 x --context 2"),
        ("--decode --memory 1", "no context length fits"),
        ("--prefill --memory inf", "--memory inf: write GB per device"),
        ("--prefill --devices 0", "--devices 0: write a whole number, 1 or more"),
        ("--decode --devices -1", "--devices -1: write a whole number, 1 or more"),
        ("--prefill --context -1", "--context -1: write a whole number, 1 or more"),
    ],
)
def test_bad_queries_are_refused(flags: str, part: str) -> None:
    base = "--model llama3-8b --cluster dgx-h100 --devices 8 --seq-length 1024"
    done = CliRunner().invoke(app, ["plan", *base.split(), *flags.split()])
    assert done.exit_code == 2 and done.output.startswith("error: ") and part in done.output, done.output
