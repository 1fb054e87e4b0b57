"""The launch and byte budget of a rank, per call or per ring step. See ``ops.py``.

    python tests/equipment/cuda/budget.py --write    write budget.json, and the tables of docs/gpu/budget.md

A ring step is the additional cost of a call on one more rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from equipment.cuda import libraries
from equipment.cuda.calls import RANK, RANKS, Linear, Peerless, Softmax, leaf
from equipment.cuda.device import CUDA, FakeCuda
from equipment.cuda.ops import Launch

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.comm import Ledger
from cp_plugin.engine.comm.payload import PayloadMesh
from cp_plugin.engine.inference.session import Session

HERE = Path(__file__).parent
FILE = HERE / "budget.json"
PAGE = HERE.parents[2] / "docs" / "gpu" / "budget.md"
TOKENS, HEADS, SIZE = 4096, 8, 128
MANY = 64
"""Ranks of the entries that show how many peers a rank talks to."""
SLOTS = 16384
"""Of the cache of a decode step, all in use."""


class Figures(NamedTuple):
    """Cost of one pass on a rank."""

    launches: int
    nbytes: int
    """Read and written by the launches."""
    elements: int
    """Of this rank's q, or of its cached keys: what bytes are divided by."""
    allocations: int
    peak: int
    """Bytes alive at once beside inputs and what the forward pass left."""
    messages: dict[str, int]
    """Calls of each verb of the mesh."""
    sent: int
    """Bytes."""
    operations: dict[str, int]
    """Launches of each operation."""
    log: tuple[Launch, ...] = ()
    """Of the whole call; not in the file."""

    def data(self) -> dict[str, Any]:
        """What the file contains."""
        return {name: value for name, value in self._asdict().items() if name != "log"}

    def minus(self, fewer: Figures) -> Figures:
        """The difference, with this one's peak."""
        less = {
            name: getattr(self, name) - getattr(fewer, name) for name in ("launches", "nbytes", "allocations", "sent")
        }
        tables = {name: _minus(getattr(self, name), getattr(fewer, name)) for name in ("messages", "operations")}
        return self._replace(**less, **tables)


def _minus(more: dict[str, int], fewer: dict[str, int]) -> dict[str, int]:
    return {key: n for key in sorted({*more, *fewer}) if (n := more.get(key, 0) - fewer.get(key, 0))}


Entry = Callable[[FakeCuda], dict[str, Figures]]
"""Measures: pass -> figures."""


def entries() -> dict[str, Entry]:
    """Everything with a budget, by name: ``table/what/kernel``."""
    measures: dict[str, Entry] = {}
    for backend in ("sdpa", "triton"):
        for layout, provider in (("zigzag", "ring"), ("striped", "striped")):
            for peer, earlier in (("an earlier", True), ("a later", False)):
                step = partial(ring_step, _case(provider, backend, layout), earlier=earlier)
                measures[f"step/{layout}, keys of {peer} rank/{backend}"] = step
    for what, case in {
        "zigzag, keys of an earlier rank, --cp-fp8 comm/sdpa": replace(_case("ring", "sdpa", "zigzag"), fp8="comm"),
        "zigzag, keys of an earlier rank, --cp-fp8 compute/te_fp8": _case("ring", "te_fp8", "zigzag"),
        "needed in zigzag, keys of an earlier rank, --cp-fp8 comm/triton": replace(
            _case("needed", "triton", "zigzag"), fp8="comm"
        ),
    }.items():
        measures[f"step/{what}"] = partial(ring_step, case, earlier=True)
    measures[f"message/rows of k and v to and from {MANY - 1} ranks, --cp-fp8 comm/triton"] = rows_of_many
    for backend in ("sdpa", "triton"):
        for provider in ("ring", "attention2d", "all_gather", "ulysses"):
            layout = "contiguous" if provider == "ulysses" else "zigzag"
            measures[f"call/{provider}, {layout}/{backend}"] = partial(attention, _case(provider, backend, layout))
    for rule, decay in (*product([""], ("no", "head", "key")), *product(["delta rule, "], ("no", "token and head"))):
        for backend, kernel in (("auto", "fla"), ("chunked", "chunked")):
            case = Linear(variant="basic", backend=backend)
            name = "no decay" if decay == "no" else f"a decay per {decay}"
            measures[f"linear/lasp2, {rule}{name}/{kernel}"] = partial(linear, case, decay, delta=rule != "")
    many = Linear(provider="zeco", variant="basic", backend="auto", ranks=MANY, rank=MANY // 2)
    measures[f"linear/zeco on {MANY} ranks, a decay per key/fla"] = partial(linear, many, "key")
    measures["linear/short convolution of 4 tokens/triton"] = convolution
    for fp8_cache in (False, True):
        kept = "float8" if fp8_cache else "bfloat16"
        measures[f"decode/a layer, {SLOTS} slots in {kept}/triton"] = partial(decode_layer, fp8_cache)
    measures["decode/a step, before its first layer/plain torch"] = decode_step
    return measures


def _case(provider: str, backend: str, layout: str | None = None) -> Softmax:
    return Softmax(provider=provider, backend=backend, layout=layout, tokens=TOKENS, head_dim=SIZE)


def attention(case: Softmax, device: FakeCuda) -> dict[str, Figures]:
    """A repeated call of softmax attention."""
    cp = case.context_parallel()
    case.run(cp)
    inputs = case.inputs()
    return _both(device, cp.mesh.ledger, lambda: case.forward(cp, inputs), inputs)


def ring_step(case: Softmax, device: FakeCuda, *, earlier: bool) -> dict[str, Figures]:
    """The cost of one more rank whose keys all precede this rank's, or all follow them."""
    more, fewer = (attention(replace(case, ranks=n, rank=n - 1 if earlier else 0), device) for n in (5, 4))
    return {name: more[name].minus(fewer[name]) for name in more}


def linear(case: Linear, decay: str, device: FakeCuda, *, delta: bool = False) -> dict[str, Figures]:
    """A call of linear attention, also by the delta rule, without feature maps and norms."""
    cp = case.context_parallel()
    inputs = {name: leaf(TOKENS, 1, HEADS, SIZE) for name in ("q", "k", "v")}
    shapes = {"head": (HEADS,), "key": (TOKENS, 1, HEADS, SIZE), "token and head": (TOKENS, 1, HEADS)}
    if decay in shapes:
        inputs["log_decay"] = leaf(*shapes[decay], dtype=torch.float32)
    if delta:
        inputs["beta"] = leaf(TOKENS, 1, HEADS)
    return _both(device, cp.mesh.ledger, lambda: cp.linear_attention(**inputs), tuple(inputs.values()))


def rows_of_many(device: FakeCuda) -> dict[str, Figures]:
    """The message of a stage of ``needed`` whose rows come from, and go to, all other ranks."""
    mesh, rows = Peerless({"cp": MANY}, 0), [0, *[TOKENS // MANY] * (MANY - 1)]
    k, v = (torch.empty(sum(rows), 1, HEADS, SIZE, dtype=torch.bfloat16, device=CUDA) for _ in range(2))

    def fetch() -> object:
        return PayloadMesh(mesh, block=64).all_to_all_v("cp", (k, v), rows, rows).wait()

    return _forward(device, mesh.ledger, k.numel(), fetch)


def convolution(device: FakeCuda) -> dict[str, Figures]:
    """Of the first channels of a projection, as in a gated delta net."""
    cp = ContextParallel("lasp2", mesh=Peerless({"cp": RANKS}, RANK))
    projected, weight, bias = leaf(TOKENS, 1, 2 * HEADS * SIZE), leaf(HEADS * SIZE, 4), leaf(HEADS * SIZE)
    x = projected.detach()[..., : HEADS * SIZE].requires_grad_()
    inputs = (x, weight, bias)
    return _both(device, cp.mesh.ledger, lambda: short_convolution(cp, *inputs), inputs)


def decode_layer(fp8: bool, device: FakeCuda) -> dict[str, Figures]:
    """One token of one sequence: attention on this rank, and the merge along the tree."""
    session, q = _session(fp8), torch.empty(1, 1, HEADS, SIZE, dtype=torch.bfloat16, device=CUDA)
    with session.decode():
        return _forward(device, session.mesh.ledger, SLOTS * HEADS * SIZE, lambda: session.attend("layer", q, q, q))


def decode_step(device: FakeCuda) -> dict[str, Figures]:
    """The part of a step shared by all layers."""
    session = _session(False)

    def step() -> None:
        with session.decode():
            pass

    return _forward(device, session.mesh.ledger, SLOTS * HEADS * SIZE, step)


def _session(fp8: bool) -> Session:
    cp = _case("ring", "sdpa").context_parallel()
    session = Session(cp, batch=1, capacity=SLOTS + 2, mesh=Peerless({"cp": 4}, 0), fp8=fp8, device=CUDA)
    with session.prefill(4 * SLOTS), torch.no_grad():
        q = torch.empty(SLOTS, 1, HEADS, SIZE, dtype=torch.bfloat16, device=CUDA)
        session.attend("layer", q, q, q)
    session.close([4 * SLOTS])
    return session


def _both(
    device: FakeCuda, ledger: Ledger, call: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> dict[str, Figures]:
    """inputs: the first has the elements of a rank's q."""
    outs: list[torch.Tensor] = []
    elements = inputs[0].numel()
    passes = _forward(device, ledger, elements, lambda: outs.append(call()))
    dout = torch.empty_like(outs[-1])
    backward = _measured(device, ledger, elements, lambda: torch.autograd.grad(outs[-1], inputs, dout))
    return passes | {"backward": backward}


def _forward(device: FakeCuda, ledger: Ledger, elements: int, call: Callable[[], object]) -> dict[str, Figures]:
    """The second call."""
    call()
    return {"forward": _measured(device, ledger, elements, call)}


def _measured(device: FakeCuda, ledger: Ledger, elements: int, call: Callable[[], object]) -> Figures:
    ledger.reset()
    device.ops.clear()
    call()
    ops = device.ops
    messages: Counter[str] = Counter()
    for line in ledger.entries():
        messages[line.op] += line.calls
    return Figures(
        launches=len(ops.launches),
        nbytes=ops.nbytes,
        elements=elements,
        allocations=ops.allocations,
        peak=ops.peak,
        messages=dict(sorted(messages.items())),
        sent=ledger.bytes(),
        operations=dict(sorted(ops.counts.items())),
        log=tuple(ops.launches),
    )


def kept() -> dict[str, dict[str, Figures]]:
    """The figures in the file."""
    data = json.loads(FILE.read_text())
    return {name: {way: Figures(**figures) for way, figures in ways.items()} for name, ways in data.items()}


def differences(name: str, way: str, want: Figures, got: Figures) -> list[str]:
    """Changes of an entry, with the lines that launch the operations concerned."""
    changes = [
        f"{name}, {way}: {field} {before} -> {after}"
        for field, after in got.data().items()
        if field != "operations" and (before := getattr(want, field)) != after
    ]
    for operation, change in _minus(got.operations, want.operations).items():
        places = Counter(launch.place for launch in got.log if launch.name == operation)
        lines = ", ".join(f"{n} x {line}" for line, n in places.most_common())
        changes.append(f"{name}, {way}: {change:+} {operation}; the call launches it at {lines or 'no line any more'}")
    return changes


def written(entries: dict[str, dict[str, Figures]]) -> str:
    """JSON with two lines per pass: its figures, and its launches."""
    parts = []
    for name, ways in entries.items():
        passes = {
            way: json.dumps(one.data()).replace(', "operations"', ',\n   "operations"') for way, one in ways.items()
        }
        lines = ",\n".join(f"  {json.dumps(way)}: {one}" for way, one in passes.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write() -> None:
    """Measure everything, and write the file and its page."""
    import generate

    with pytest.MonkeyPatch.context() as patch, FakeCuda() as device:
        libraries.install(patch, device, 3)
        FILE.write_text(written({name: measure(device) for name, measure in entries().items()}))
    PAGE.write_text(generate.filled(PAGE.read_text()))


if __name__ == "__main__":
    write() if sys.argv[1:] == ["--write"] else sys.exit(__doc__)
