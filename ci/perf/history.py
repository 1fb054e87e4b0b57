"""History of performance ratios: JSON lines of measurements, the ratios of the last release, and a plot.

python ci/perf/history.py FILE PLOT.svg     plot what ``ratios.py --history FILE`` has collected
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

RELEASED = Path(__file__).with_name("released.json")
ROOT = Path(__file__).parents[2]


def released(file: Path = RELEASED) -> dict[str, float]:
    """Ratios of the last release by name; empty if none are recorded."""
    return json.loads(file.read_text())["ratios"] if file.exists() else {}


def write_release(version: str, ratios: Mapping[str, float], file: Path = RELEASED) -> None:
    """Record the reference for later measurements."""
    file.write_text(json.dumps({"version": version, **_here(), "ratios": dict(ratios)}, indent=1) + "\n")


def append(ratios: Mapping[str, float], file: Path) -> None:
    """Append a measurement."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps({**_here(), "ratios": dict(ratios)}) + "\n")


def read(file: Path) -> list[dict]:
    """All measurements, oldest first; ValueError naming a bad line."""
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            entry = json.loads(line)
            found.append({"date": datetime.fromisoformat(entry["date"]), **{k: entry[k] for k in ("commit", "ratios")}})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: no measurement ({error!r})") from None
    return found


def plot(file: Path, image: Path) -> None:
    """Plot every ratio over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = read(file)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name in dict.fromkeys(name for entry in entries for name in entry["ratios"]):
        of_name = [entry for entry in entries if name in entry["ratios"]]
        axes.plot([e["date"] for e in of_name], [e["ratios"][name] for e in of_name], "o-", ms=4, label=name)
    axes.axhline(1, color="gray", lw=0.8)
    axes.set(ylabel="baseline time over ours")
    axes.legend(frameon=False, fontsize=8)
    figure.autofmt_xdate()
    figure.savefig(image)
    plt.close(figure)


def _here() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "not known",
        "machine": f"{_processor()}, {platform.system()}",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
