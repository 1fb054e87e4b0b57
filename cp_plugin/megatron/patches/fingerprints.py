"""The sources of Megatron's functions that were compared with the plugin's: ``known_sources.json``, by ``digest``.

    {symbol: {fingerprint: {"versions": ["0.19.2", ...], "lines": hashes of its lines}}}

A version is what a source tree calls itself: several commits of Megatron-LM have the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known_sources.json")


def read() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(FILE.read_text(encoding="utf-8"))


FINGERPRINTS: dict[str, dict[str, tuple[str, ...]]] = {
    symbol: {digest: tuple(known["versions"]) for digest, known in sources.items()}
    for symbol, sources in read().items()
}
"""Symbol -> fingerprint -> versions."""
