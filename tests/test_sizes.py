"""The ratchet: no room (a folder with code) grows unless others shrink as much; ``sizes.toml`` has every room's limits.

    python tests/test_sizes.py     lower all limits to what is there, and print which rooms are above theirs

To raise a limit, edit it, and lower others of the same top folder by as much: their sum may not exceed ``most``.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "sizes.toml"
SLACK = 150
"""Lines by which a top folder's limits may exceed what is there: a commit that removes more lowers them."""

Sizes = dict[str, dict[str, int]]


def measured() -> Sizes:
    """Count files of Python and shell and their lines, by room."""
    tracked = subprocess.run(["git", "ls-files", "-z", "*.py", "*.sh"], cwd=ROOT, capture_output=True, check=True)
    rooms: Sizes = defaultdict(lambda: {"files": 0, "lines": 0})
    for name in filter(None, tracked.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            room = rooms[str(Path(name).parent)]
            room["files"] += 1
            room["lines"] += path.read_bytes().count(b"\n")
    return dict(sorted(rooms.items()))


def sum_by_top(rooms: Sizes) -> dict[str, int]:
    """Sum the lines by top folder."""
    lines: dict[str, int] = defaultdict(int)
    for room, size in rooms.items():
        lines[room.split("/")[0]] += size["lines"]
    return dict(lines)


def too_large(rooms: Sizes, limits: Sizes) -> list[str]:
    """Return a line for each room above its limits."""
    none = {"files": 0, "lines": 0}
    return [
        f"{room}: {size[what]} {what}, {limits.get(room, none)[what]} allowed"
        for room, size in rooms.items()
        for what in none
        if size[what] > limits.get(room, none)[what]
    ]


def test_no_room_has_grown() -> None:
    table = tomllib.loads(LIMITS.read_text())
    rooms, limits, most = measured(), table["rooms"], table["most"]
    assert not too_large(rooms, limits), "remove as much elsewhere, and move the limits in sizes.toml"
    allowed = sum_by_top(limits)
    assert not {top: lines for top, lines in allowed.items() if lines > most.get(top, 0)}, "sums of rooms above `most`"
    loose = {top: lines - sum_by_top(rooms).get(top, 0) for top, lines in most.items()}
    assert not {top: lines for top, lines in loose.items() if lines > SLACK}, "lower them: python tests/test_sizes.py"


def main() -> None:
    rooms = measured()
    table = tomllib.loads(LIMITS.read_text())
    print(*too_large(rooms, table["rooms"]), sep="\n")
    kept = {room: limit for room, limit in table["rooms"].items() if room in rooms}
    most = {top: min(lines, sum_by_top(rooms).get(top, 0)) for top, lines in table["most"].items()}
    lines = ["[most]", *(f"{top} = {n}" for top, n in most.items()), "", "[rooms]"]
    for room, limit in kept.items():
        files, long = (min(n, rooms[room][what]) for what, n in limit.items())
        lines.append(f'"{room}" = {{ files = {files}, lines = {long} }}')
    LIMITS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
