"""Inference under context parallelism: prefill by any provider, a cache divided over the ranks, decode by a tree."""

from cp_plugin.inference.session import Session
from cp_plugin.inference.slots import CacheFullError, Slots, slots_for

__all__ = ["CacheFullError", "Session", "Slots", "slots_for"]
