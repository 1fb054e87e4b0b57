"""Batches of commands for ``ip`` and ``tc`` of iproute2, which build a virtual cluster."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Literal

_FRAME = 1514  # bytes of a full Ethernet frame
_FRAMES = 20  # handed to a link in one piece, at most
_FREE = 10**11  # bits per second: no limit in practice


@functools.cache
def missing() -> str | None:
    """What this machine lacks for a virtual cluster, as a sentence, or None."""
    if os.geteuid() != 0:
        return "a virtual cluster needs root (network namespaces): run it as root, for example in a container"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"a virtual cluster needs {' and '.join(absent)}: install iproute2 (apt-get install iproute2)"
    lines = [line.format("lo") for line in shaping(10**6, "dst", ["10.77.0.1"])]
    try:  # on the loopback device of a temporary namespace
        batch("tc", lines, inside=lambda: os.unshare(os.CLONE_NEWNET))
    except (RuntimeError, subprocess.SubprocessError) as error:
        return f"a virtual cluster needs network namespaces and the kernel's htb and u32, and cannot use them: {error}"
    return None


def batch(
    tool: str,
    lines: Sequence[str],
    namespace: str | None = None,
    *,
    force: bool = False,
    inside: Callable[[], None] | None = None,
) -> None:
    """Run the commands in one ``ip`` or ``tc`` process; RuntimeError with its message.

    force: ignore failing commands. inside: called in the process before it starts.
    """
    where = ["-n", namespace] if namespace else []
    command = [tool, *where, *(["-force"] if force else []), "-batch", "-"]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        start_new_session=True,  # a terminal's Ctrl-C must not interrupt the batch
        preexec_fn=inside,
    )
    if done.returncode != 0 and not force:
        raise RuntimeError(
            f"{' '.join(command)} failed: {done.stderr.strip()}\nthe commands were:\n" + "\n".join(lines)
        )


def packets(rate: int) -> str:
    """The command that limits a packet to 2 ms of the rate, at least one frame: it passes two shaped ends, and a large
    one would add its own time to every message."""
    frames = min(max(_burst_bytes(rate) // _FRAME, 1), _FRAMES)
    return f"link set dev {{}} gso_max_segs {frames}"


def shaping(rate: int, field: Literal["src", "dst"], peers: Sequence[str]) -> list[str]:
    """Commands that shape one end of a link: a queue per peer, sharing the rate (bits per second) in turn.

    With a single queue a short message to one peer would wait behind a long one to another. Bare TCP acknowledgements
    bypass the queues: otherwise opposite streams would halve each other's speed.

    Args:
        field: the packet field by which peers differ at this end.
        peers: their addresses.
    """
    burst = max(_burst_bytes(rate), 2 * _FRAME)  # little comes free after a pause
    turn = min(burst, 60000)
    offset = {"src": 12, "dst": 16}[field]
    match = "filter add dev {} protocol ip parent 1: prio"
    lines = [
        "qdisc add dev {} root handle 1: htb default 2",
        f"class add dev {{}} parent 1: classid 1:1 htb {_limit(rate, rate, burst)} quantum {turn}",
        f"class add dev {{}} parent 1: classid 1:2 htb {_limit(_FREE, _FREE, 1 << 16)} quantum {turn} prio 0",
        f"{match} 1 u32 match u16 0 0xffc0 at 2 flowid 1:2",  # shorter than 64 bytes
        f"{match} 2 handle 2: u32 divisor 256",  # a table by the third number of the address: the node
        f"{match} 2 u32 ht 801:: match u32 0 0 hashkey mask 0x0000ff00 at {offset} link 2:",
    ]
    for number, peer in enumerate(peers, start=3):
        lines += [
            f"class add dev {{}} parent 1:1 classid 1:{number:x} htb {_limit(1000, rate, burst)} quantum {turn} prio 1",
            f"qdisc add dev {{}} parent 1:{number:x} pfifo limit 1000000",
            f"{match} 2 u32 ht 2:{int(peer.split('.')[2]):x}: match ip {field} {peer}/32 flowid 1:{number:x}",
        ]
    return lines


def _limit(rate: int, ceiling: int, burst: int) -> str:
    return f"rate {rate}bit ceil {ceiling}bit burst {burst} cburst {burst}"


def _burst_bytes(rate: int) -> int:
    """Bytes in 2 ms."""
    return rate // 8 // 500
