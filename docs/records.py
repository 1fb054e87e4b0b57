"""JSON records of figures beside the pages: a row of a table is a line, so that differences can be read."""

from __future__ import annotations

import json
import re
from typing import Any

_ROW = re.compile(r"\[\n +(\"(?:[^\[\]{}]|\\.)*?)\n +\]")
"""A list of texts, one a line."""


def dumps(content: Any) -> str:
    """The record as text."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    return _ROW.sub(lambda found: "[" + re.sub(r",\n +", ", ", found[1]) + "]", text) + "\n"
