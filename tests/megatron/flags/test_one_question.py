"""One question to the planner, however it is asked, and no answer that the rules of a training run refuse."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import pytest
from nightly import NIGHT
from test_planned import COMMON, LLAMA
from typer.testing import CliRunner

from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.planned import command as planned
from cp_plugin.megatron.planned import sizes
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Inferred
from cp_plugin.planner.query import Fixed, Query, from_name, keep_fitting
from cp_plugin.planner.search import Plan, answer
from cp_plugin.planner.training.model import Model, model
from cp_plugin.testing.launch import run_ranks
from cp_plugin.tools import flags
from cp_plugin.tools.app import app
from cp_plugin.tools.flags import document_lengths
from cp_plugin.tools.show_plan import as_json

pytestmark = pytest.mark.usefixtures("_cpu_megatron")
PROVIDED = ("striped", "usp", "attention2d", "ulysses", "burst --cp-backward q", "ring --cp-layout contiguous")


class Case(NamedTuple):
    """A question that can be put in every way."""

    name: str
    devices: int
    tensor: int
    pipeline: int
    context: int
    tokens: int
    recompute: str
    documents: str
    window: int
    memory: float
    provider: str

    @classmethod
    def drawn(cls, seed: int) -> Self:
        rng = random.Random(seed)
        tensor, pipeline, context = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2)), rng.choice((2, 4, 8))
        data = max(rng.choice((1, 1, 2)), 8 // (tensor * pipeline * context))
        return cls(
            *(rng.choice(("llama2-7b", "llama3.2-1b", "llama3.2-1b")), tensor * pipeline * context * data),
            *(tensor, pipeline, context, context * rng.choice((2**10, 2**11, 2**12))),
            *(rng.choice(("none", "selective", "full", "full")), rng.choice(("", "", "chat", "5000,300,2000"))),
            *(rng.choice((0, 0, 1023)), rng.choice((0, 0, 60, 200)), rng.choice(PROVIDED)),
        )

    @property
    def model(self) -> Model:
        window = {"attention_pattern": "W", "window": (self.window, 0)} if self.window else {}
        return replace(model(self.name), **window)

    @property
    def flags(self) -> list[str]:
        """Megatron's."""
        m = model(self.name)
        sizes = f"--num-layers {m.layers} --hidden-size {m.hidden} --ffn-hidden-size {m.ffn_hidden} "
        sizes += f"--num-attention-heads {m.heads} --kv-channels {m.head_dim} --vocab-size {m.vocab} "
        sizes += f"--group-query-attention --num-query-groups {m.kv_heads} " if m.kv_heads < m.heads else ""
        sizes += f"--window-size {self.window},0 " if self.window else ""
        tied = "--untie-embeddings-and-output-weights"
        own = COMMON if not m.tied else COMMON.replace(tied, "")
        own = own.replace("8192", str(self.tokens)).replace("size 64", f"size {self.data}")
        again = "" if self.recompute == "none" else f"--recompute-granularity {self.recompute} "
        again += "--recompute-method uniform --recompute-num-layers 1 " if self.recompute == "full" else ""
        divided = f"--tensor-model-parallel-size {self.tensor} --pipeline-model-parallel-size {self.pipeline} "
        divided += f"--context-parallel-size {self.context} " + "--sequence-parallel " * (self.tensor > 1)
        rest = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        return f"{own} {sizes}{again}{divided}{rest}".split()

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def fixed(self) -> Fixed:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        return Fixed(**sizes, recompute=self.recompute)  # type: ignore[arg-type]

    @property
    def machine(self) -> hardware.Cluster:
        cluster = hardware.cluster("dgx-h100")
        device = cluster.device.model_copy(update={"memory_bytes": 1e9 * self.memory or cluster.device.memory_bytes})
        return cluster.model_copy(update={"device": device})


GROUP = 6
CASES = [Case.drawn(seed) for seed in range(int(os.environ.get("CP_PLUGIN_FUZZ", 60 if NIGHT else 6)))]


@cache
def asked_by_flags(group: int) -> list[tuple[Any, ...]]:
    """Each case's question by stock's flags, with a provider, and with ``auto``, whose answer and choice follow."""

    def answer_question(case: Case, args: argparse.Namespace, settings: Settings) -> tuple[Any, ...]:
        from cp_plugin.megatron.planned import auto

        plans: list[Plan] = []
        pack = sizes.Packed(document_lengths(case.documents, case.tokens), "") if case.documents else None
        with (
            patch.object(sizes, "pack_of", lambda *_: pack),
            patch.object(auto.cpu, "active", lambda: False),
            patch.object(auto, "_cluster", lambda _: Inferred(case.machine, "")),
            patch.object(auto, "_why_not_stock", lambda *_: ""),
            patch.object(auto, "answer", lambda question: plans.append(answer(question)) or plans[-1]),
        ):
            question = sizes.question(args, settings)[:3]
            if not settings.undecided:
                return (question,)
            try:
                settings = auto.decide(args, settings, may_leave=True)
            except ValueError as error:
                assert "nothing fits" in str(error)
        chosen = settings.provider if settings.active else f"stock {args.cp_comm_type[0]}"
        return question, *(told(plan) for plan in plans or [None]), chosen

    def body() -> Any:
        answers = []
        for case in CASES[group * GROUP : (group + 1) * GROUP]:
            os.environ["WORLD_SIZE"] = str(case.devices)
            ways = ([], ["--cp-provider", *case.provider.split()], ["--cp-provider", "auto"])
            each = (planned.with_arguments([*case.flags, *way], partial(answer_question, case)) for way in ways)
            answers.append([item for way in each for item in (way if type(way) is tuple else [way])])
        return answers

    return run_ranks(body, 1, env={"WORLD_SIZE": "8"}, timeout=300)[0]


def told(plan: Plan | None) -> dict[str, Any]:
    """Choice, seconds and memory of every method, with its flags; None: nothing fits."""
    if plan is None:
        return {}
    every = json.loads(json.dumps(as_json(plan)))
    return {key: every[key] for key in ("methods", "tied", "documents", "cluster", "cannot", "not_simulated")}


@pytest.mark.parametrize("number", range(len(CASES)))
def test_one_question_has_one_answer(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Python, a model's name, stock's flags, flags with a provider, and ``auto``."""
    case, answers = CASES[number], asked_by_flags(number // GROUP)[number % GROUP]
    stock, provided, undecided, by_auto, chosen = answers
    assert stock == provided == undecided
    named = from_name(case.name, case.devices, case.tokens, machine := case.machine, case.fixed)
    question = flags.packed(replace(named, model=case.model), case.documents or None)
    try:
        by_python = told(answer(keep_fitting(question)))
        assert not by_python["methods"][0]["fits"] or chosen == by_python["methods"][0]["method"]
    except ValueError as error:
        by_python = {}
        assert "nothing fits" in str(error)
    assert by_auto == by_python

    monkeypatch.setattr(planned, "question", lambda *_: stock)
    monkeypatch.setattr(hardware, "cluster", lambda _: machine)
    docs = ["--documents", case.documents] * bool(case.documents)
    whole = ["--model", case.name, "--seq-length", str(case.tokens), "--recompute", case.recompute]
    whole += ["--tensor", str(case.tensor), "--pipeline", str(case.pipeline), "--context", str(case.context)]
    for way in (["--", *case.flags], whole) if not case.window else (["--", *case.flags],):
        done = CliRunner().invoke(
            app, [*["plan", "--json", "--cluster", "x", "--devices"], str(case.devices), *docs, *way]
        )
        if not by_python:
            assert done.exit_code == 2 and "nothing fits" in done.output
            continue
        assert by_python.items() <= json.loads(done.stdout).items()
        assert done.exit_code == (not by_python["methods"][0]["fits"]), "the exit status says whether it fits"


STOCK_ALONE = {
    "--attention-dropout 0.1": "--attention-dropout 0.1: .*set --attention-dropout 0",
    "--num-experts 8 --moe-expert-capacity-factor 1 --moe-router-topk 2": "--moe-expert-capacity-factor 1.0",
    "--window-size 100,0 --log-straggler": "--log-straggler",
    "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": "",
}
"""Stock's flags -> what our rules refuse of them."""


def test_what_the_rules_refuse_is_not_recommended() -> None:
    """A provider that would stop at the same flags has no row, and the plan says why."""

    def body() -> Any:
        split = f"{LLAMA} --context-parallel-size 4 --tensor-model-parallel-size 8 --sequence-parallel"
        return [planned.with_arguments(f"{split} {flags}".split(), sizes.question) for flags in STOCK_ALONE]

    questions = run_ranks(body, 1, env={"WORLD_SIZE": "32"})[0]
    for refused, (described, parallel, allowed, _) in zip(STOCK_ALONE.values(), questions, strict=True):
        question = Query(
            model=described, cluster=hardware.cluster("dgx-h100"), shapes=[parallel], allowed=allowed, limit=1e13
        )
        plan = as_json(answer(question))
        assert bool(refused) == all(method["method"].startswith("stock ") for method in plan["methods"])
        assert re.search(refused, plan["refused"]) and bool(plan["refused"]) == bool(refused)
