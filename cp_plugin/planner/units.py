"""Numbers with a unit and a range: outside it a figure is not unlikely but in the wrong unit.

All are SI: bytes (not bits), seconds, FLOP/s. The limits leave an order of magnitude beyond any machine there is.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _within(low: float, high: float, unit: str) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            where = f"below {low:g}" if value < low else f"above {high:g}"
            raise ValueError(f"is {where}: expected {unit}")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, _within(0, 1, "seconds, such as 5e-6 for 5 microseconds")]
"""Of one message or one kernel call, beside what grows with its size."""
Bytes = Annotated[float, _within(1e6, 1e14, "bytes, such as 80e9 for 80 GB")]
BytesPerSecond = Annotated[float, _within(1e6, 1e14, "bytes per second, such as 25e9 for 25 GB/s or 200 Gb/s")]
FlopsPerSecond = Annotated[float, _within(1e6, 2e16, "FLOP/s, such as 250e12 for 250 TFLOP/s")]
Ranks = Annotated[int, _within(1, 4096, "a number of devices, such as 8")]
Cards = Annotated[int, _within(1, 4096, "a number of network cards, such as 8")]
Sharers = Annotated[int, _within(0, 4096, "a number of ranks, 0 where none share")]
Tokens = Annotated[int, _within(1, 65536, "a number of tokens, such as 128")]
