"""Host of each context-parallel rank.

Context-parallel ranks are strided by tensor parallelism, so ranks per host cannot be derived from devices per node; the
ranks are asked (``comm.every_rank.gather_hosts``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def neighbours_per_host(hosts: Sequence[str]) -> int:
    """Neighbouring ranks that share a host; 1 if that is uneven or unknown."""
    runs = [len(list(run)) for _, run in itertools.groupby(hosts)]
    return runs[0] if len(set(runs)) == 1 else 1


def describe(hosts: Sequence[str]) -> str:
    """The placement for messages: ``ranks 0-3 on a, 4-7 on b``."""
    if not hosts:
        return "the hosts of the ranks are unknown"
    parts, start = [], 0
    for host, run in itertools.groupby(hosts):
        end = start + len(list(run))
        parts.append(f"{start}-{end - 1} on {host}" if end - start > 1 else f"{start} on {host}")
        start = end
    return f"ranks {', '.join(parts[:8])}{f' and {len(parts) - 8} more runs' if len(parts) > 8 else ''}"
