"""What each part of the start-up check finds of the harmful edits of Megatron (``tests/megatron/edits.toml``).

    ci/megatron/ablation.py [--out docs/ablation.json] [EDIT...]

Every edit trains a step on forked CPU ranks. What a part finds is noted, and does not stop the run, so that the later
parts are asked, too; only what stops by itself ends it. The JSON file maps an edit to the parts that find it. It is
written after each edit; edits that are in it are skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OWN, ATTENTION = "Megatron's own attention", "attention's calls in this step"
STEP, LATER, STOPS = "a step of the run", "the rest of the first step", "a refusal by name"
_STARTS = {
    OWN: ("the plugin reads",),
    ATTENTION: ("layer ",),
    LATER: ("learning rates", "gradients between", "the loss that is logged", "weights"),
}
"""Part of the check -> how its texts begin; others are of the step."""


def prepare(found: Path) -> None:
    """Note in a file of this folder, for each rank, which parts find something."""
    from cp_plugin.megatron.selfcheck import checked_call, first_step

    def note(texts: list[str]) -> None:
        with (found / f"parts.{first_step.dist.get_rank()}").open("a", encoding="utf-8") as file:
            for text in texts:
                file.write(next((part for part, starts in _STARTS.items() if text.startswith(starts)), STEP) + "\n")

    def silent(calls: Any) -> list[str]:
        note(calls.problems)
        return []

    checked_call.Every.found, first_step.stop_if_any = property(silent), note


def parts(edit: Any, folder: Path) -> list[str]:
    """The parts that find an edit; folder: that of ``prepare``."""
    import test_edits

    from cp_plugin.testing.launch import RankError

    stopped, noted = [], set[str]()
    with tempfile.TemporaryDirectory() as edited:
        try:
            test_edits._train(edit.flags, edit, Path(edited))
        except RankError:
            stopped = [STOPS]
    for file in folder.glob("parts.*"):
        noted |= {*file.read_text().splitlines()}
        file.unlink()
    return sorted(noted) or stopped


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edits", nargs="*", metavar="EDIT", help="names (default: all that are harmful)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "ablation.json")
    given = parser.parse_args(argv)
    import edits
    import warm

    from cp_plugin.megatron import activate

    activate(["--cp-device", "cpu"])
    import cp_plugin.megatron.models.gpt  # noqa: F401

    warm.before_forking()
    known = json.loads(given.out.read_text(encoding="utf-8"))["edits"] if given.out.exists() else {}
    chosen = [one for one in edits.read() if one.found and (not given.edits or one.name in given.edits)]
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for edit in chosen:
            if edit.name in known and not given.edits:
                continue
            known[edit.name] = ", ".join(parts(edit, Path(folder))) or "nothing"
            print(f"ABLATION {edit.name}: {known[edit.name]}", flush=True)
            found = {"parts": [STEP, ATTENTION, OWN, LATER, STOPS], "edits": known}
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
