"""Print texts while they are generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

type Decode = Callable[[Sequence[int]], str]

_BEFORE = 8
"""Earlier tokens that are decoded with new ones: a token's text depends on its neighbours."""
_UNFINISHED = "\ufffd"


class Streamed:
    """Prints a single text as it grows, several texts at the end.

    A long text is decoded once; then only its last tokens are decoded again: those not yet shown and a few before.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], decode: Decode, *, quiet: bool) -> None:
        self._decode, self._quiet = decode, quiet
        self._texts = [list(ids) for ids in prompts]
        self._alone = len(prompts) == 1 and not quiet
        if self._alone:
            self._shown = len(self._texts[0])
            self._from = max(0, self._shown - _BEFORE)
            self._write(decode(self._texts[0]))

    def add(self, new: Sequence[int]) -> None:
        """Append a token to each text; -1: none."""
        for text, token in zip(self._texts, new, strict=True):
            text += [token] if token >= 0 else []
        if self._alone:
            self._advance()

    def end(self) -> None:
        """Print the rest: there are no more tokens."""
        if self._alone:
            self._advance(last=True)
            self._write("\n")
        elif not self._quiet:
            for number, text in enumerate(self._texts, 1):
                print(f"--- {number}\n{self._decode(text)}", flush=True)

    def _advance(self, *, last: bool = False) -> None:
        """Print complete characters, which may take several tokens."""
        ids = self._texts[0]
        text = self._decode(ids[self._from :])
        if text.endswith(_UNFINISHED) and not last:
            return
        self._write(text[len(self._decode(ids[self._from : self._shown])) :])
        self._from, self._shown = max(self._from, self._shown - _BEFORE), len(ids)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
