"""Parity: Megatron's training loop with context parallelism computes what it does without.

Same weights, float32: loss of the first step within 1e-6 relative, every parameter's gradient within 1e-4 relative
(norm), losses of 20 SGD steps within 1e-5. Every rank is compared with the rank of the same tensor-, pipeline- and
data-parallel coordinates in the run without context parallelism.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from harness import MODEL, SGD, Record, train

LOSS, GRADIENT, TRAINING = 1e-6, 1e-4, 1e-5


@functools.cache
def stock(
    ranks: int,
    flags: str,
    *,
    steps: int = 1,
    model: str = MODEL,
    training: str = SGD,
    prepare: Callable[[], None] | None = None,
) -> list[Record]:
    """A cached training without context parallelism."""
    return train(ranks, flags, steps=steps, model=model, training=training, prepare=prepare)


def check(
    flags: str,
    divided: str,
    *,
    cp: int = 4,
    ranks: int = 1,
    steps: int = 2,
    want: str | None = None,
    model: str = MODEL,
    training: str = SGD,
    prepare: Callable[[], None] | None = None,
    alone: Callable[[], None] | None = None,
    counted: bool = False,
) -> tuple[list[Record], list[Record]]:
    """Train with and without context parallelism, and compare; returns the records of both.

    flags: of the model; want: those of the run without, if they differ.
    divided: flags of context parallelism, on ``cp`` times ``ranks`` ranks.
    prepare, alone: called on every rank of the run with, and without.
    counted: every rank must have sent the bytes of the closed formula.
    """
    common = {"steps": steps, "model": model, "training": training}
    got = train(cp * ranks, f"{flags} --context-parallel-size {cp} {divided}", prepare=prepare, **common)
    base = stock(ranks, flags if want is None else want, prepare=alone, **common)
    compare(got, base, steps=steps)
    if counted:
        for record in got:
            assert record.sent == record.formula, record.coordinates
    assert any(record.sent for record in got)
    return got, base


def compare(got: Sequence[Record], want: Sequence[Record], *, steps: int) -> None:
    place = {(r.coordinates["tp"], r.coordinates["pp"], r.coordinates["dp"]): r for r in want}
    assert len(place) == len(want)
    for record in got:
        base = place[record.coordinates["tp"], record.coordinates["pp"], record.coordinates["dp"]]
        assert record.weights.keys() == base.weights.keys()
        for name, weight in base.weights.items():
            assert torch.equal(record.weights[name], weight), f"{name}: not the same weights to begin with"
        for name, grad in base.grads.items():
            error, norm = (record.grads[name] - grad).norm().item(), grad.norm().item()
            assert error <= GRADIENT * norm, (
                f"gradient of {name} on {record.coordinates}: {error:.1e} off, norm {norm:.1e}"
            )
        assert len(record.losses) == len(base.losses) == (steps if base.losses else 0)
        errors = [abs(a / b - 1) for a, b in zip(record.losses, base.losses, strict=True)]
        assert max(errors[:1], default=0) <= LOSS
        assert max(errors, default=0) <= TRAINING
    assert any(record.losses for record in got)
