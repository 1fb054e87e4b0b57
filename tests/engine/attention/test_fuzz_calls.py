"""Random calls of plain torch inside random wrappers: each equals one device in float64, or is refused at once.

    ci/fuzz.sh --examples N      so many; a slice runs with the other tests

What several ranks find, outputs and all gradients, is compared with a plain formula of the whole sequence. Below
float64 errors may be twice those of one rank without wrappers. A refusal is a ValueError on every rank, by a call that
has sent nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from call_cases import CALLS, LOSSES, MODES, PENALTIES, SHARDED, VIEWS, WRAPPERS, Batch, Function, Trial
from call_strategies import trials
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from linear_cases import DECAYS
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.packs import place_documents
from cp_plugin.engine.comm import run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.launch import run_ranks

EXAMPLES = int(os.environ.get("CP_PLUGIN_FUZZ", "240"))
"""Of all calls together, as many of each."""
FORKED = max(2, EXAMPLES // 100)
"""Starts of processes, each for ``TOGETHER`` calls."""
BY_DAY = "CP_PLUGIN_FUZZ" not in os.environ
"""The same cases in every run; at night others each time."""
TOGETHER = 5
QUIET: Any = {"derandomize": BY_DAY, "suppress_health_check": list(HealthCheck), "print_blob": True}


class Refused(Exception):
    """A ValueError, and the bytes that this call had sent by then."""


WITHIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda layer: layer,
    "DDP": DistributedDataParallel,
    "FSDP2": fully_shard,
}


class Layer(nn.Module):
    """A call, of views of leaves, some of which are multiplied by a parameter."""

    def __init__(self, t: Trial, dtype: torch.dtype, call: Callable[[Batch, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.trial, self.call = t, call
        self.scale = nn.ParameterDict({name: torch.full((4,), 0.875, dtype=dtype) for name in sorted(t.scaled)})

    def forward(self, batch: Batch, *leaves: Tensor) -> Tensor:
        f: Function = lambda *x: self.call_on_views(batch, *x)  # noqa: E731
        for name in self.trial.wrappers:
            f = WRAPPERS[name](f)
        return f(*leaves)

    def call_on_views(self, batch: Batch, *leaves: Tensor) -> Tensor:
        shapes = CALLS[self.trial.call].shapes(self.trial, batch.tokens)
        inputs = {}
        for x, (name, shape) in zip(leaves, shapes.items(), strict=True):
            x = x * self.scale[name].mean() if name in self.trial.scaled else x
            inputs[name] = VIEWS[self.trial.views[name]].view(x, shape)
        y = self.call(batch, inputs)
        if not self.trial.repeated:
            return y
        first = next(iter(inputs))
        return y + self.call(batch, inputs | {first: inputs[first].sin()})


def values(t: Trial, b: Batch) -> dict[str, Tensor]:
    """Whole leaves in float64, rounded to the dtype."""
    g = torch.Generator().manual_seed(b.seed)
    leaves = {}
    for name, shape in CALLS[t.call].shapes(t, b.tokens).items():
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        if name == "log_decay":
            x = (1 if b.args.get("grows") else -1) * x.square() * 10 ** (b.seed % 4 - 2)
        if name == "beta":
            x = x.sigmoid()
        if name == "k" and t.args.get("delta"):
            x = F.normalize(x, dim=-1)
        leaves[name] = VIEWS[t.views[name]].leaf(x.to(t.dtype).double())
    return leaves


SHARE = "share of "


def trained(
    t: Trial, cp: ContextParallel, around: Callable[[nn.Module], nn.Module], *, exact: bool = False
) -> dict[str, Tensor]:
    """Outputs and gradients, of whole sequences or (where the name says so) this rank's share of a sum.

    exact: by the formula, in float64, on one rank.
    """
    call, dtype = CALLS[t.call], torch.float64 if exact else t.dtype

    def place(b: Batch) -> ContextParallel:
        packed = b.bounds and (b.placed or cp.layout.name == "documents")
        return place_documents(cp, b.cu_seqlens) if packed else cp

    def call_on_inputs(b: Batch, x: dict[str, Tensor]) -> Tensor:
        return call.alone(t, b, x) if exact else call.ours(place(b), t, b, x)

    layer = Layer(t, dtype, call_on_inputs)
    module = around(layer)
    results: dict[str, Tensor] = {}
    backwards = []
    for n, b in enumerate(t.batches):
        sent = cp.mesh.ledger.bytes()
        shapes = call.shapes(t, b.tokens)
        long = [x for x in shapes if x in SHARDED and shapes[x][0] == b.tokens]
        dims = {x: VIEWS[t.views[x]].dim for x in long}
        leaves = {name: x.to(dtype) for name, x in values(t, b).items()}
        try:
            leaves = {name: place(b).shard(x, dims[name]).clone() if name in dims else x for name, x in leaves.items()}
            for name, x in leaves.items():
                x.requires_grad_(name in t.wanted)
            with MODES[b.mode]():
                y = module(b, *leaves.values())
        except ValueError as error:
            raise Refused(str(error), cp.mesh.ledger.bytes() - sent) from error
        results[f"out {n}"] = place(b).unshard(y.detach())
        if b.mode == "train":
            w = torch.randn(results[f"out {n}"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
            loss = LOSSES[t.loss](y, place(b).shard(w.to(y.dtype)))

            def backward(n: int = n, b: Batch = b, loss: Tensor = loss, leaves: Any = leaves, dims: Any = dims) -> None:
                wanted = {name: leaves[name] for name in sorted(t.wanted)}
                if t.derivative in PENALTIES:
                    for name, x in second(t, loss, wanted).items():
                        results[f"dd {name} {n}"] = (
                            place(b).unshard(x, dims[name]) if name in dims and x is not None else x
                        )
                    return
                loss.backward(inputs=list(wanted.values()) if t.derivative == "backward(inputs=)" else None)
                for name in wanted:
                    grad = leaves[name].grad
                    assert grad is not None, f"no gradient of {name}"
                    key = f"d {name} {n}" if name in dims else f"{SHARE}d {name} {n}"
                    results[key] = place(b).unshard(grad, dims[name]) if name in dims else grad

            backwards.append(backward)
            if t.order == "in turn":
                backwards.pop()()
    for backward in backwards[:: -1 if t.order == "last first" else 1]:
        backward()
    if isinstance(module, FSDPModule):
        module.reshard()  # after a forward pass without gradients the weights of that forward stand there
    for name, parameter in layer.scale.items():  # unused ones have none, or zeros: wrappers differ
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        results[f"{SHARE}d scale of {name}"] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return results


def second(t: Trial, loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a penalty on gradients, if it depends on anything; None where they are refused."""
    slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    penalty = torch.stack([x.square().sum() for x in slopes]).sum()
    if not penalty.requires_grad:
        return {}
    try:
        got = PENALTIES[t.derivative](penalty, list(leaves.values()))
    except RuntimeError as refused:
        if "first derivatives only" not in str(refused):
            raise
        return dict.fromkeys(leaves)
    grads = [x.grad for x in leaves.values()] if got is None else got
    return {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)}


def train_on_rank(t: Trial, mesh: Any = None, group: Any = None, *, exact: bool = False) -> dict[str, Tensor] | Refused:
    """``trained``, or why not."""
    size = t.size if mesh is not None or group is not None else 1
    options = {name: x for name, x in t.options.items() if size > 1 or name in ("layout", "backend")}
    cp = ContextParallel(t.provider, mesh=mesh, group=group, problem=t.problem(size), **options)
    try:
        return trained(t, cp, WITHIN[t.within if group is not None else "nothing"], exact=exact)
    except Refused as refused:
        return refused


def judge(t: Trial, ranks: Sequence[dict[str, Tensor] | Refused]) -> str:
    """``right`` or ``refused``; AssertionError for anything else.

    DDP and FSDP2 average the shares of sums, but do so on every rank: their sum is the same.
    """
    refused = [rank for rank in ranks if isinstance(rank, Refused)]
    if refused:
        assert len(refused) == len(ranks), f"refused by {len(refused)} of {len(ranks)} ranks: {refused[0]}"
        assert all(len(why) > 20 and not sent for why, sent in (rank.args for rank in refused)), refused
        return "refused"
    assert not any(b.wrong for b in t.batches), "wrong bounds are not refused"
    assert not any("grows" in b.args for b in t.batches), "a growing state is not refused"
    exact = train_on_rank(replace(t, wrappers=()), exact=True)
    plain = [name for name in t.wrappers if "autocast" in name]
    narrow = t.dtype != torch.float64 or bool(plain)
    one = train_on_rank(replace(t, wrappers=tuple(plain))) if narrow else {}
    assert not isinstance(one, Refused), one
    first_only = {name for name, x in ranks[0].items() if x is None}
    assert all({name for name, x in rank.items() if x is None} == first_only for rank in ranks)
    assert not (ranks[0].keys() ^ exact.keys()) - first_only
    size = exact["out 0"].norm().item()
    for name, got in ranks[0].items():
        if name in first_only or (first_only and name.startswith(f"{SHARE}d scale")):
            continue  # refused, and so had no gradient for the weights
        if narrow and not one[name].isfinite().all():
            continue  # too large for the dtype on one rank, too
        want = exact[name]
        shares = [rank[name].double() for rank in ranks] if name.startswith(SHARE) else []
        got = sum(shares) if shares else got
        assert got.shape == want.shape, f"{name} has the shape {tuple(got.shape)}, not {tuple(want.shape)}"
        unit = want.norm().item() if want.norm() > 1e-6 * size else size or 1.0  # nothing is left of a long shift
        error = (got.double() - want).norm().item() / unit
        allowed = LIMITS[t.dtype] if not plain else LIMITS[torch.bfloat16]
        if narrow:
            rounding = allowed * sum(share.norm().item() for share in shares) / unit  # of each share
            allowed = max(allowed, 2 * (one[name].double() - want).norm().item() / unit) + rounding
        assert error <= allowed, f"{name} is off by {error:.1e}, allowed {allowed:.1e}"
    return "right"


LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative; of 16 bits, one rounding."""


def settles(t: Trial) -> dict[str, int] | None:
    """The axes of its mesh; None if its options are refused."""
    try:
        return providers.settle(t.provider, t.problem(t.size), Options(**t.options)).axes
    except ValueError as refused:
        assert len(str(refused)) > 20
        event(f"{t.call}: refused by settle")
        return None


@pytest.mark.parametrize("call", CALLS)
@given(data=st.data())
@settings(max_examples=EXAMPLES // len(CALLS), **QUIET)
def test_calls_in_wrappers_equal_one_device_or_are_refused(call: str, data: st.DataObject) -> None:
    t = data.draw(trials(call=call))
    axes = settles(t)
    if axes:
        torch._dynamo.reset()
        event(f"{t.call}: {judge(t, run_threads(lambda mesh: train_on_rank(t, mesh), axes, patience=10))}")


@given(st.integers(2, 3).flatmap(lambda n: st.lists(trials(list(WITHIN), n), min_size=TOGETHER, max_size=TOGETHER)))
@settings(max_examples=FORKED, **QUIET)
def test_calls_in_wrappers_on_processes(ts: list[Trial]) -> None:
    def rank() -> list[dict[str, Tensor] | Refused]:
        return [train_on_rank(t, group=dist.group.WORLD) for t in fit]

    fit = [t for t in ts if settles(t)]
    if fit:
        of_ranks = run_ranks(rank, ts[0].size, init_process_group=True, timeout=120)
        for t, *ranks in zip(fit, *of_ranks, strict=True):
            event(f"{t.call}, {t.within}: {judge(t, ranks)}")


CAN_BE_DRAWN: dict[str, Callable[[Trial, Batch], object]] = {
    "padded bounds": lambda t, b: b.bounds[-2:] == (b.tokens, b.tokens),
    "bounds that are none": lambda t, b: b.wrong,
    "one object, with and without placed documents": lambda t, b: len({x.placed for x in t.batches if x.bounds}) > 1,
    "lengths that vary": lambda t, b: len({x.tokens for x in t.batches}) > 2,
    "a mask that changes": lambda t, b: b.args["causal"] != t.args["causal"],
    "a factor that changes": lambda t, b: b.args["scale"] != t.args["scale"],
    "capped scores and a sink": lambda t, b: t.args.get("softcap") and t.args["sink"],
    "a tree": lambda t, b: b.tree[0],
    "a window and a sink": lambda t, b: t.args.get("window") and t.args["sink"],
    "a growing state": lambda t, b: b.args.get("grows"),
    **{f"a decay per {x}": lambda t, b, x=x: t.args.get("decay") == x for x in DECAYS},
    **{str(x): lambda t, b, x=x: t.dtype == x for x in LIMITS},
    **{x: lambda t, b, x=x: t.derivative == x for x in ("backward(inputs=)", *PENALTIES)},
    "documents in lasp2": lambda t, b: t.provider == "lasp2" and b.bounds,
}


def test_inputs_of_known_faults_can_be_drawn() -> None:
    missing = dict(CAN_BE_DRAWN)

    def draw(t: Trial) -> None:
        for name in [name for name, of in missing.items() if any(of(t, batch) for batch in t.batches)]:
            del missing[name]
        if not missing:
            raise StopIteration

    quiet = {"database": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.generate]}
    with suppress(StopIteration):
        settings(max_examples=4000, derandomize=True, report_multiple_bugs=False, **quiet)(given(trials())(draw))()
    assert not missing


PLANTED = {
    "a dense last dimension": ("cp_plugin.engine.attention.softmax.dense", lambda x: x, "out 0 is off"),
    "a share of a sum": (
        "cp_plugin.engine.attention.softmax.sink_gradient",
        lambda sink, *_: sink * 0,
        "of d sink 0 is off",
    ),
    "a refusal": ("cp_plugin.engine.attention.packs.ContextParallel.attention", None, "this is refused"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"causal": True, "window": None, "scale": None, "softcap": None, "sink": True}
    views = {"q": "every second", "k": "plain", "v": "batch first", "sink": "plain"}
    of = {"args": chosen, "views": views, "wanted": frozenset({"q", "sink"})}
    t = Trial(call="attention", provider="ring", size=2, batches=(Batch(tokens=8, seed=0, args=chosen),), **of)

    def judge_trial() -> str:
        return judge(t, run_threads(lambda mesh: train_on_rank(t, mesh), {"cp": 2}))

    assert judge_trial() == "right"
    where, planted, said = PLANTED[fault]

    def late(cp: ContextParallel, q: Tensor, *x: Tensor, **named: Any) -> Tensor:
        raise ValueError(f"{cp.unshard(q.detach())}: this is refused")

    monkeypatch.setattr(where, planted or late)
    with pytest.raises(AssertionError, match=said):
        judge_trial()
