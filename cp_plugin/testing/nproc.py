"""The option ``--nproc N`` in front of a command line; imports nothing."""

from __future__ import annotations


def split_nproc(argv: list[str]) -> tuple[int | None, list[str]]:
    """The number after a leading ``--nproc`` (None without it) and the rest; ValueError if it is no positive number."""
    if not argv or argv[0].split("=", 1)[0] != "--nproc":
        return None, argv
    _, equals, value = argv[0].partition("=")
    rest = argv[1:]
    if not equals:
        value, rest = (rest[0], rest[1:]) if rest else ("", [])
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"--nproc {value}: write the number of ranks to start, such as --nproc 4")
    return int(value), rest
