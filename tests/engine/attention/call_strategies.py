"""Random calls of plain torch: methods, masks, documents, sizes, dtypes, wrappers and derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from call_cases import CALLS, LOSSES, MODES, OFTEN, PENALTIES, SHARDED, VIEWS, Batch, Trial
from hypothesis import strategies as st
from linear_cases import DECAYS
from mask_cases import trees

from cp_plugin.engine.methods import registry as providers

MOST = ["attention", "linear_attention"] * 3


@st.composite
def trials(
    draw: st.DrawFn, within: Sequence[str] = ("nothing",), size: int | None = None, call: str | None = None
) -> Trial:
    forked = size is not None
    call = call or draw(st.sampled_from([*CALLS, *MOST]))
    linear = call in ("linear_attention", "short_convolution")
    softmax = call == "attention"
    kinds = ["linear"] if linear else ["softmax"] if softmax else ["softmax", "linear"]
    known = [name for kind in kinds for name in providers.names(kind)]
    provider = draw(st.sampled_from([name for name in known if name != "linear_ring"]))  # it refuses most
    layouts = providers.get(provider).layouts
    size = size or draw(st.sampled_from([2, 2, 3, 3, 4, 4, 5, 6, 8]))
    options: dict[str, Any] = {"layout": draw(st.sampled_from(layouts))} if draw(st.booleans()) else {}
    if softmax or call == "linear_attention":
        options["backend"] = draw(st.sampled_from(["auto", "reference"]))
    if softmax and size % 2 == 0 and draw(st.integers(0, 3)) == 0:
        options["head_parallel"] = 2
    numbers = st.none() | st.sampled_from([1, 2, 3, 4])
    own: dict[str, st.SearchStrategy[Any]] = {
        "grid": st.none() | st.sampled_from([(n, size // n) for n in range(1, size + 1) if size % n == 0]),
        "intra_size": numbers,
        "backward": st.sampled_from([None, "auto", "kv", "q"]),
        "head_groups": numbers,
    }
    drawn = {name: draw(x) for name, x in own.items() if softmax and name in providers.get(provider).options}
    options |= {name: x for name, x in drawn.items() if x is not None}
    kv_heads = draw(st.sampled_from([1, 2, size]))
    bound = st.sampled_from([-1, 0, 1, 5])
    args: dict[str, Any] = {"scale": draw(st.none() | st.sampled_from([0.3, 1.0])), "window": None, "causal": True}
    if softmax:
        args |= {"sink": draw(st.booleans()), "window": draw(st.none() | st.tuples(bound, bound))}
        args["softcap"] = draw(st.none() | st.none() | st.sampled_from([0.5, 2, 30.0]))
    if linear:
        args |= {"decay": draw(st.sampled_from(DECAYS)), "delta": draw(st.booleans())}
    if call == "attention" or (call == "linear_attention" and not args["delta"]):
        args["causal"] = draw(st.sampled_from([True, True, False]))
    if call == "short_convolution":
        args |= {"width": draw(st.integers(1, 5)), "bias": draw(st.booleans())}
    if call in ("shift", "unshard"):
        args |= {"dim": draw(st.integers(-4, 3)), "by": draw(st.integers(-3, 3) | st.sampled_from([7, -30, 48]))}
    wrapping = draw(st.lists(st.sampled_from(OFTEN), max_size=2, unique=True))
    t = Trial(
        call=call,
        provider=provider,
        size=size,
        dtype=draw(st.sampled_from([torch.float64] * 6 + [torch.float32, torch.float16, torch.bfloat16])),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 2)),
        head_dim=8 * draw(st.integers(1, 2)),
        v_head_dim=8 * draw(st.integers(1, 2)),
        rows=draw(st.integers(1, 2)),
        batches=tuple(draw(st.lists(batches(call, args, size, layouts), min_size=1, max_size=3))),
        options=options,
        args=args,
        wrappers=tuple(wrapping),
        loss=draw(st.sampled_from(sorted(LOSSES))),
        order=draw(st.sampled_from(["in turn", "in flight", "last first"])),
    )
    shapes = CALLS[call].shapes(t, 0)
    long = [name for name in shapes if name in SHARDED and not shapes[name][0]]
    views = {name: draw(st.sampled_from([v for v in VIEWS if len(x) > VIEWS[v].above])) for name, x in shapes.items()}
    wanted = draw(st.sets(st.sampled_from(sorted(shapes)), min_size=1))
    scaled = draw(st.sets(st.sampled_from(sorted(shapes)), max_size=2))
    narrow = t.dtype in (torch.float16, torch.bfloat16) or any("autocast" in name for name in wrapping)
    scaled = frozenset() if narrow else frozenset(scaled)  # the rounding of a sum is not twice another's
    t = replace(t, views=views, wanted=frozenset(wanted), scaled=scaled, repeated=draw(st.booleans()))
    derivative = draw(st.sampled_from(["backward"] * 5 + ["backward(inputs=)", *PENALTIES]))
    if derivative in PENALTIES and not forked:  # checkpoints and compilers have first derivatives only
        wanted = draw(st.sets(st.sampled_from(long), min_size=1))
        t = replace(t, derivative=derivative, wanted=frozenset(wanted), wrappers=(), order="in turn")
    elif derivative == "backward(inputs=)" and not any("reentrant" in name for name in wrapping):
        t = replace(t, derivative=derivative, scaled=frozenset())
    if not forked or not t.scaled:
        return t
    first, *others = t.batches  # DDP and FSDP2 are for training, one backward after the other
    others = [b for b in others if b.mode != "inference"]
    of_training = (replace(first, mode="train"), *others)
    return replace(t, within=draw(st.sampled_from(within)), batches=of_training, order="in turn")


@st.composite
def batches(draw: st.DrawFn, call: str, args: dict[str, Any], size: int, layouts: Sequence[str]) -> Batch:
    tokens = 2 * size * draw(st.integers(1, 4))
    own = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from([0.2, 1.0]))}
    if call in MOST and draw(st.booleans()):
        other = draw(st.sets(st.sampled_from(["scale"] if args.get("delta") or not args["causal"] else sorted(own))))
        args = args | {name: own[name] for name in other}
    if args.get("decay", "none") != "none" and call != "short_convolution" and draw(st.integers(0, 19)) == 0:
        args = args | {"grows": True}
    mode = draw(st.sampled_from(["train", *MODES]))
    batch = Batch(tokens=tokens, seed=draw(st.integers(0, 7)), mode=mode, args=args)
    if call not in ("attention", "linear_attention", "short_convolution") or draw(st.booleans()):
        return batch
    if call == "attention" and args["causal"] and args["window"] is None and draw(st.booleans()):
        tree = draw(trees(tokens))
        return replace(batch, tree=(tuple(tree.lengths), tuple(tree.parents)))
    inner = draw(st.lists(st.integers(0, tokens), max_size=4))
    bounds = (0, *sorted(inner), tokens, *[tokens] * draw(st.sampled_from([0, 0, 1, 3])))
    if draw(st.integers(0, 15)) == 0:
        bounds = draw(st.sampled_from([bounds[1:], bounds[:-1], bounds[::-1], (0, tokens, 1, tokens)]))
    return replace(batch, bounds=bounds, placed="documents" in layouts and draw(st.integers(0, 2)) == 0)
