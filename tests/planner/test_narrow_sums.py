"""``gradient_dtype=model`` in the planner: what the default sends is priced, in variants, too."""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import TOKENS
from cp_plugin.planner.candidates import Allowed, Candidate, candidates, variants
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.price import least, place_on

PROBLEM = Problem(size=8, heads=32, kv_heads=32, seq_length=2**15).with_transport(
    hosts=tuple(f"node{n}" for n in range(8))
)
SLOW = hardware.cluster("h100-1-per-node")


def test_the_default_is_priced_as_it_is_sent() -> None:
    """With equal heads and few tokens between nodes, the table chooses bfloat16: of ours alone, and for every size."""
    by_name = candidates(place_on(PROBLEM.with_transport(hosts=()), SLOW, 1))
    for name, some in by_name.items():
        for one in some:
            summed = not one.upstream and "gradient_dtype" in one.setup.provider.options
            behind = PROBLEM.size // (one.setup.options.head_parallel or 1)
            narrow = summed and behind > 1 and PROBLEM.seq_length // behind <= TOKENS[1]
            assert one.setup.options.gradient_dtype == ("model" if narrow else None), (name, one.setup.options)
            assert ("--cp-gradient-dtype model" in one.flags) == narrow
    ring = by_name["ring"][0]
    told = candidates(place_on(PROBLEM, SLOW, 1), allowed=Allowed(options=Options(gradient_dtype="float32")))["ring"][0]
    assert least(ring, SLOW, 1).backward < least(told, SLOW, 1).backward
    assert "--cp-gradient-dtype float32" in told.flags
    processors = hardware.override(hardware.cluster("cpu"), per_node=1, nics=1)
    assert candidates(place_on(PROBLEM, processors, 1))["ring"][0].setup.options.gradient_dtype is None, "Gloo"


def test_variants_are_chosen_anew() -> None:
    """On 16 ranks dk and dv may be rounded, and dq, which travels in a variant of the same candidate, may not."""
    problem = replace(PROBLEM, size=16, seq_length=2**16).with_transport(hosts=tuple(f"node{n}" for n in range(16)))
    (first, *_) = candidates(problem, allowed=Allowed(layouts=["zigzag"]))["double_ring"]
    assert first.setup.options.gradient_dtype == "model"
    burst = settled(providers.get("burst"), problem, Options(backward="kv", layout="zigzag"))
    assert burst.options.gradient_dtype == "model"
    changed = variants(Candidate(name="burst", setup=burst, flags=""))
    chosen = {one.setup.options.backward: one.setup.options.gradient_dtype for one in changed}
    assert chosen["q"] is None and chosen["kv"] == "model"
