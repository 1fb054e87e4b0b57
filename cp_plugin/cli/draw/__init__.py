"""Pictures, drawn from the code that training uses.

    draw_layouts   which rank holds which token, and how long a causal ring takes on each layout
    draw_method    which rank computes what and when, of any provider: recorded from the method itself
    draw_traffic   the bytes that a provider sends, next to a ring's
    draw_documents who fetches which keys of a pack of documents, on two layouts

They need matplotlib (``pip install 'cp-plugin[plot]'``). The same call writes the same bytes, so that pictures can be
kept beside the code.
"""

from cp_plugin.cli.draw.documents import draw_documents
from cp_plugin.cli.draw.layouts import draw_layouts
from cp_plugin.cli.draw.method import draw_method
from cp_plugin.cli.draw.traffic import draw_traffic

__all__ = ["draw_documents", "draw_layouts", "draw_method", "draw_traffic"]
