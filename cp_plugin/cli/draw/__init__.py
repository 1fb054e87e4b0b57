"""Pictures drawn from the code that training uses.

    draw_method    which rank computes what and when: recorded from the method itself, for any provider
    draw_documents which keys of a pack of documents are fetched, on two layouts

They need matplotlib (``pip install 'cp-plugin[plot]'``). Equal calls write equal bytes, so pictures can be committed.
"""

from cp_plugin.cli.draw.documents import draw_documents
from cp_plugin.cli.draw.method import draw_method

__all__ = ["draw_documents", "draw_method"]
