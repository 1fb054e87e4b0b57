"""Linear attention: a state of fixed size in the place of keys and values.

    S_t = a_t * S_(t-1) + k_t v_t^T          o_t = S_t^T q_t          S [d, e],  0 < a_t <= 1

A part of a sequence acts on the state by one affine map, ``S -> through * S + M``, whose two numbers are all that other
parts need to know of it. Chunks of one rank (``chunked.py``) and segments of many ranks (``cp_plugin.methods.lasp2``)
are put together by the same algebra (``segment.py``).
"""
