"""Numbers in messages to people."""

from __future__ import annotations


def in_bytes(n: float) -> str:
    """A number of bytes with three digits: ``1.50 MB``. Powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def divisors(n: int) -> str:
    """All divisors, as a list to choose from."""
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
