"""Recommended methods for typical clusters and models: the table of ``docs/choose.md``."""

from __future__ import annotations

import re

from cp_plugin.cli.show_plan import flags
from cp_plugin.planner.errors import in_words, off_by
from evidence.regimes import CANONICAL, CONSTRAINT, REGIMES, Regime, answer, apart, named, shaped, verdict

SITUATIONS = (
    CANONICAL,
    Regime(name="one node", cluster="h200", devices=8, tokens=2**18),
    Regime(name="equal heads", model="llama2-7b"),
    Regime(name="a large model", model="llama3-70b", devices=256),
    Regime(name="one GPU a node", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="equal heads, one GPU a node", model="llama2-7b", cluster="h100-1-per-node", tokens=2**18),
    Regime(name="four A100 a node", model="llama2-7b", cluster="a100-4-per-node", tokens=2**17),
    Regime(name="A100 on PCIe", model="llama2-7b", cluster="a100-pcie-roce", devices=32, tokens=2**18),
    *(regime for regime in REGIMES if regime.documents and not regime.card),
)
_HEAD = "| situation | example | use | with | stock's time over ours | typical error |"


def table() -> str:
    """The table in Markdown, a note, and the flags of every row."""
    return "\n".join([_HEAD, "|---" * 6 + "|", *map(row, SITUATIONS), "", _note(), "", *map(_flags, SITUATIONS)])


def row(regime: Regime) -> str:
    found, each = answer(regime).best, apart(regime)
    providers = each.ours.provider, each.stock.provider
    cells = (
        regime.name,
        regime.example,
        named(found),
        shaped(found),
        verdict(each.ratio, *providers),
        off_by(*providers).removeprefix("typical error "),
    )
    return f"| {' | '.join(cells)} |"


def _note() -> str:
    errors = in_words(sorted({p.provider for regime in SITUATIONS for p in answer(regime).found}))
    return (
        f"Predicted, as by `cp-plugin plan`: {CONSTRAINT}, each side in its own best configuration. Methods within the "
        f"typical error of each other tie; of those, the simplest is named: stock Megatron if it is among them. "
        f"{errors[0].upper()}{errors[1:]}: the median error of a predicted ratio, so half are off by more."
    )


def _flags(regime: Regime) -> str:
    lines = re.findall(r"(.{1,96})(?: (?=--)|$)", flags(answer(regime).best))
    return f"{regime.name[0].upper()}{regime.name[1:]}:\n\n```\n{' \\\n'.join(lines)}\n```\n"
