"""What a command refuses is one line that names the flag, and exit status 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from cp_plugin.cli.app import app

SMALL = ("--heads", "4", "--head-dim", "8", "--seq-length", "32")
WRONG: dict[tuple[str, ...], list[tuple[tuple[str, ...], str]]] = {
    ("traffic",): [
        (("--provider", "rign"), "--provider rign: did you mean ring? Choose one of "),
        (
            ("--provider", "ring", "--grid", "8x8"),
            "--grid 8x8 has no effect with --provider ring: leave it out, or use",
        ),
        (("--provider", "attention2d", "--grid", "3x5"), "--grid 3x5 does not hold 64 context-parallel ranks: use one"),
        (("--grid", "8by8"), "--grid 8by8: write rows x columns, such as 8x8"),
        (("--grid", "٢x٢"), "--grid ٢x٢: write rows x columns, such as 8x8"),
        (("--kv-heads", "0"), "--kv-heads 0: write a whole number, 1 or more"),
        (("--batch", "-1"), "--batch -1: write a whole number, 1 or more"),
        (("--head-dim", "1e2"), "--head-dim 1e2: write a whole number, 1 or more"),
        (("--dtype", "fp16"), "--dtype fp16: choose one of float64, float32"),
        (("--heads", "12"), "12 query heads cannot share 8 key/value heads"),
        (("--measure", "--seq-length", "4194304"), "use a smaller --seq-length"),
    ],
    ("verify", "--device", "cpu"): [
        (("--provider", "rign"), "--provider rign: did you mean ring?"),
        (("--provider", "striped", "--layout", "zigzag"), "use --layout striped"),
        (("--backend", "fast"), "--backend fast: choose one of"),
        (("--backend", "cudnn"), "--backend cudnn cannot run here"),
        (("--kv-heads", "3"), "8 query heads cannot share 3 key/value heads"),
        (("--seq-length", "1048576"), "use a smaller --seq-length"),
    ],
    ("verify", "--decode", "--device", "cpu", *SMALL): [
        (("--mask", "full"), "--mask full has no effect with --decode"),
        (("--backward", "q"), "--backward q has no effect with --decode"),
        (("--fp8", "compute"), "use --fp8 comm"),
        (("--provider", "rign"), "--provider rign: did you mean ring?"),
        (("--seq-length", "1048576"), "use a smaller --seq-length"),
        (("--gradient-dtype", "model"), "--gradient-dtype model has no effect with --decode"),
    ],
}


@pytest.mark.parametrize(
    ("command", "args", "message"), [(command, *row) for command, rows in WRONG.items() for row in rows]
)
def test_errors_are_one_line_and_exit_status_2(command: tuple[str, ...], args: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, [*command, *args])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1
