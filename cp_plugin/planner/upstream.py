"""What Megatron's own methods send otherwise than those of ours that stand for them."""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.planner.events import Event, Post
from cp_plugin.planner.program import Program

LEAST = 2 / 3
"""Of a formula's bytes of a backward, what is sent at least: keys, values, and their gradients half as wide."""


def as_sent(of: Program) -> Program:
    """The program with gradients of keys and values in the dtype of these, as Transformer Engine sends them. Ours are
    float32: twice the bytes of the keys and values that are sent before them. The ledger stays that of ours."""
    exchanged = [e.nbytes for e in of.backward if isinstance(e, Post) and e.verb == "exchange"]
    least_exchanged = min(exchanged, default=0)

    def narrowed(event: Event) -> Event:
        if not isinstance(event, Post) or event.verb == "all_to_all":
            return event
        wide = event.verb == "reduce_scatter" or (event.verb == "exchange" and event.nbytes > least_exchanged)
        return event._replace(nbytes=event.nbytes // 2) if wide else event

    return replace(of, backward=tuple(map(narrowed, of.backward)))
