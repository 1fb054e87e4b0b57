"""Tiny transformers models of every kind: each equals one rank in loss and all gradients, or is refused by name.

    PYTHONPATH=. .venv-huggingface/bin/python ci/faults/fuzz_huggingface.py --examples 40              some, by day
    PYTHONPATH=. .venv-huggingface/bin/python ci/faults/fuzz_huggingface.py --examples 2000 --seed 7   others, by night
    PYTHONPATH=. .venv-huggingface/bin/python ci/faults/fuzz_huggingface.py --kind qwen3_next          one family

A case is a decoder family of the installed transformers, switches of its config (windows, rotary embeddings, biases,
key and value heads, any flag), a dtype, a provider with a layout, 2 or 4 ranks, rows or a pack of documents, and how
the model is called (``ways.py``). The same numbers make the same cases; ``--only NUMBER`` repeats one. Exits with 1 if
a case is wrong, or ends in an error that is not a refusal.
"""

from __future__ import annotations

import copy
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import tiny
import torch
import torch.distributed as dist
import typer
from ways import OF_ROWS, WAYS, patched

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError, RankTimeout, run_ranks

LAYOUTS: dict[str, tuple[str | None, ...]] = {
    "ring": ("contiguous", "zigzag", "documents"),
    "striped": (None,),
    "needed": ("contiguous", "zigzag", "documents"),
    "all_gather": ("zigzag", "striped"),
    "attention2d": ("zigzag", "striped", "contiguous"),
    "burst": ("zigzag", "striped"),
    "ulysses": ("contiguous", "striped"),
}
FLAGS = ("bias", "norm", "tie_", "use_", "parallel", "scale", "rotary")
"""Parts of the names of flags that are switched."""
LIMIT = 1e-4
"""Relative difference in float32. transformers' own delta rule is as far from float64."""
LONGEST = 120
"""Seconds of a case on several ranks."""
SLOW = 10
"""Seconds of the processor for one rank, beyond which several are not tried."""
ROUNDINGS = 16
"""Of one rank, where several are farther from float32."""
WRONG = "WRONG"
Verdict = tuple[str, str]
NOT_FLAGS = ("cache", "kernel", "router_logits", "return", "is_encoder", "cross", "bfloat", "quant", "checkpoint")


@dataclass(frozen=True)
class Case:
    kind: str
    settings: dict[str, Any]
    dtype: torch.dtype
    provider: str
    layout: str | None
    ranks: int
    length: int
    lengths: tuple[int, ...] = ()
    """Of packed documents; none: two rows."""
    way: str = "called"

    def batch(self) -> dict[str, torch.Tensor]:
        ids = tiny.tokens(self.length)
        return tiny.pack(*self.lengths) if self.lengths else {"input_ids": ids, "labels": ids}

    def rows(self) -> dict[str, torch.Tensor]:
        """The batch of one rank."""
        return tiny.padded(*self.lengths) if self.lengths else self.batch()


def families() -> list[str]:
    """``model_type`` of every causal language model of text alone that transformers knows; others are refused."""
    auto = tiny.transformers.models.auto
    known = auto.configuration_auto.CONFIG_MAPPING
    kinds = [kind for kind in auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in known]
    return sorted(kind for kind in kinds if not known[kind].sub_configs)


def draw_case(number: int, kinds: list[str]) -> Case:
    draw = random.Random(number)
    kind = kinds[number % len(kinds)] if number < len(kinds) else draw.choice(kinds)
    provider = draw.choice(sorted(LAYOUTS))
    length = draw.choice((64, 96, 128))
    lengths: list[int] = []
    while draw.random() < 0.8 and sum(lengths) < length - 2 and (lengths or draw.random() < 0.4):
        lengths.append(draw.randint(1, length - sum(lengths) - 1))
    if lengths:
        lengths.append(length - sum(lengths))
    ranks = draw.choice((2, 4))
    way = draw.choice(("called",) * 6 + tuple(WAYS))
    return Case(
        kind=kind,
        settings=switched(kind, draw) if number >= len(kinds) else {},
        dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16)),
        provider=provider,
        layout=draw.choice(LAYOUTS[provider]),
        ranks=2 if provider == "ulysses" else ranks,
        length=length,
        lengths=() if way in OF_ROWS else tuple(lengths),
        way=way,
    )


def switched(kind: str, draw: random.Random) -> dict[str, Any]:
    """Settings of a family that differ from the usual ones."""
    try:
        usual = vars(tiny.transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]())
    except Exception:  # it has no usual ones
        return {}
    names = [name for name in usual if not name.startswith("_")]
    chosen: dict[str, Any] = {}
    for name in names:
        flag = isinstance(usual[name], bool) and any(part in name for part in FLAGS)
        if flag and not any(part in name for part in NOT_FLAGS) and draw.random() < 0.3:
            chosen[name] = draw.random() < 0.5
    if "sliding_window" in names and draw.random() < 0.6:
        chosen["sliding_window"] = draw.choice((5, 16, 33, 80))
    if "num_key_value_heads" in names and draw.random() < 0.4:
        chosen["num_key_value_heads"] = draw.choice((1, 2, 4))
    if "max_window_layers" in names:
        chosen["max_window_layers"] = draw.choice((0, 1, 2))
    parameters = usual.get("rope_parameters")
    if isinstance(parameters, dict) and "rope_type" in parameters and draw.random() < 0.5:
        part = parameters.get("partial_rotary_factor", 1.0)
        pairs = int(part * tiny.SIZES["qk_rope_head_dim" if "qk_rope_head_dim" in names else "head_dim"]) // 2
        chosen["rope_parameters"] = {**parameters, "rope_theta": 1e4, **draw.choice(ropes(pairs))}
        chosen["max_position_embeddings"] = draw.choice((32, 96, 256))
    return chosen


def ropes(pairs: int) -> list[dict[str, Any]]:
    """The parameters of a rope of every type, of so many angles."""
    original = "original_max_position_embeddings"
    factors = {"short_factor": [1.0] * pairs, "long_factor": [1.5] * pairs}
    return [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, original: 32},
        {"rope_type": "llama3", "factor": 4.0, original: 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope", "factor": 2.0, original: 48, **factors},
    ]


class Built(NamedTuple):
    """A case's model, and how it trains on one rank."""

    model: Any
    one: tiny.Trained
    exact: tiny.Trained
    """In float32."""

    @classmethod
    def from_case(cls, case: Case) -> Built:
        """
        Raises:
            Exception: where transformers cannot train it.
        """
        config = tiny.config_of(case.kind, **case.settings)
        model, wide = (tiny.built(copy.deepcopy(config), dtype) for dtype in (case.dtype, torch.float32))
        if case.way == "patched":
            patched(model)
            patched(wide)
        one = trained(case, model)
        exact = one if case.dtype == torch.float32 else trained(case, wide)
        if not all(x.isfinite().all() for x in (*one.gradients.values(), *exact.gradients.values())):
            raise ArithmeticError("one rank has gradients that are not finite")
        return cls(model, one, exact)

    def rounded_otherwise(self, case: Case) -> float:
        """The largest error of one rank with other roundings of its embeddings: where a token is nearly as close to
        another expert, they send it there, and that expert's gradient is another one."""
        weight = self.model.get_input_embeddings().weight
        before, errors = weight.detach().clone(), []
        for seed in range(ROUNDINGS):
            draws = torch.rand(before.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
            with torch.no_grad():
                weight.copy_(before * (1 + 2 * torch.finfo(case.dtype).eps * draws))
            errors.append(tiny.difference(trained(case, self.model), self.exact))
        with torch.no_grad():
            weight.copy_(before)
        return max(errors)


def trained(case: Case, model: Any, cp: ContextParallel | None = None) -> tiny.Trained:
    """Of this rank; with cp by its part of the batch."""
    forward = WAYS[case.way](model, cp)
    if case.way == "evaluated":  # the same loss on every rank
        share = 1 if cp is None else cp.size
        return tiny.Trained(float(forward(**case.rows())) / share, {"": torch.ones(1, dtype=torch.float64) / share})
    return tiny.train(model, case.rows() if cp is None else huggingface.shard(cp, **case.batch()), forward)


def compare(case: Case, built: Built) -> float | str:
    """How far the ranks of the default group are from one; or a refusal."""
    try:
        options = {} if case.layout is None else {"layout": case.layout}
        cp = ContextParallel(case.provider, group=dist.group.WORLD, **options)
        huggingface.apply(built.model, cp)
        part = trained(case, built.model, cp)
    except ValueError as error:
        return str(error)
    return tiny.difference(tiny.summed(part), built.exact)


def judged(case: Case, built: Built, results: list[float | str]) -> Verdict:
    refusals = [result for result in results if isinstance(result, str)]
    if case.way == "saved" and any("config" in refusal for refusal in refusals):
        return WRONG, f"a false alarm: {refusals[0]}"
    if refusals:
        return ("refused", refusals[0]) if len(refusals) == case.ranks else (WRONG, f"one rank refuses: {refusals[0]}")
    if case.way == "padded on one rank":
        return WRONG, "not refused"
    error, limit = max(results), LIMIT  # type: ignore[type-var]
    if case.dtype == torch.bfloat16:
        limit = 4 * tiny.difference(built.one, built.exact) + 0.02
    if not error <= limit:
        limit = max(limit, 1.5 * built.rounded_otherwise(case) + 0.02 * (case.dtype == torch.bfloat16))
    return ("equal", "") if error <= limit else (WRONG, f"{error:.1e}, allowed {limit:.1e}")


def outcome(case: Case) -> Verdict:
    """``equal``, ``refused``, ``not built``, ``too slow`` or ``WRONG``, and what was found."""
    began = time.process_time()
    try:
        built = Built.from_case(case)
    except Exception as error:  # on one rank, without us
        return "not built", f"{type(error).__name__}: {str(error)[-100:]}"
    if (took := time.process_time() - began) > SLOW:
        return "too slow", f"{took:.0f} s on one rank"
    try:
        results = run_ranks(partial(compare, case, built), case.ranks, init_process_group=True, timeout=LONGEST)
    except RankTimeout as error:
        return WRONG, str(error).splitlines()[0]
    except RankError as error:
        return WRONG, f"not a refusal: {error.traceback.splitlines()[-1]}"
    return judged(case, built, results)


def run(
    examples: Annotated[int, typer.Option(help="cases")] = 40,
    seed: Annotated[int, typer.Option(help="of the first case; the families come in turn at 0")] = 0,
    kind: Annotated[str, typer.Option(help="families, with commas")] = "",
    only: Annotated[int, typer.Option(help="one case")] = -1,
    verbose: Annotated[bool, typer.Option(help="print every case")] = False,
) -> None:
    tiny.transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # ranks are forked from this process
    kinds, began, counts = kind.split(",") if kind else families(), time.monotonic(), Counter[str]()
    first = 1_000_003 * seed
    numbers = [only] if only >= 0 else range(first, first + examples)
    for number in numbers:
        case = draw_case(number, kinds)
        verdict, what = outcome(case)
        counts[verdict] += 1
        if verdict == WRONG or verbose or only >= 0:
            print(f"{number}: {verdict}: {what[:300]}\n    {case}", flush=True)
    print(f"{counts.total()} cases in {time.monotonic() - began:.0f} s: {dict(counts)}")
    sys.exit(counts[WRONG] > 0)


if __name__ == "__main__":
    typer.run(run)
