"""Context-parallel inference: prefill by any provider, a sharded KV cache, tree-reduced decode."""

from cp_plugin.engine.inference.session import Session
from cp_plugin.engine.inference.slots import CacheFullError, Slots, slots_for

__all__ = ["CacheFullError", "Session", "Slots", "slots_for"]
