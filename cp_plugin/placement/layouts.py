"""Token layouts by name: the regular ones, and ``documents``, built per pack."""

from __future__ import annotations

from cp_plugin.common.names import not_one_of
from cp_plugin.core.layout import LAYOUTS, Layout
from cp_plugin.core.spelling import spelled
from cp_plugin.placement.documents import DOCUMENTS

ALL: dict[str, Layout] = LAYOUTS | {DOCUMENTS.name: DOCUMENTS}


def get_layout(name: str) -> Layout:
    """The layout of that name; ValueError, which lists the valid ones, for an unknown name."""
    if name not in ALL:
        raise ValueError(not_one_of(spelled("layout", name), name, ALL))
    return ALL[name]
