"""A message that did not come: which one it was, and between whom."""

from __future__ import annotations

from dataclasses import dataclass

from cp_plugin.core.text import ranks_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a message is known by. ``str`` of it: ``backward exchange along 'ring' with ranks 0, 3``."""

    phase: str
    """``forward`` or ``backward``: of the attention call that posted it."""
    verb: str
    axis: str
    peers: tuple[int, ...]
    """Global ranks."""

    def __str__(self) -> str:
        return f"{self.phase} {self.verb} along {self.axis!r} with {ranks_named(self.peers)}"


class MessageError(RuntimeError):
    """torch.distributed gave a message up: a peer is gone, or did not come within the timeout."""

    def __init__(self, named: Named, cause: BaseException) -> None:
        super().__init__(f"{named} failed: {cause}")
        self.named = named
