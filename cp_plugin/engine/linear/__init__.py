"""Linear attention: a fixed-size state instead of keys and values.

    S_t = a_t * S_(t-1) + k_t v_t^T          o_t = S_t^T q_t          S [d, e],  0 < a_t <= 1

A part of a sequence acts on the state as an affine map ``S -> factor * S + M``; other parts need nothing else of it.
Chunks within a rank (``decayed.py``, ``delta.py``) and segments across ranks (``engine.methods.lasp2``) combine by
the same algebra (``segment.py``).
"""
