"""Context-parallel inference: prefill by any provider, a sharded KV cache, tree-reduced decode."""

from cp_plugin.engine.inference.session import Session as Session
from cp_plugin.engine.inference.slots import CacheFullError as CacheFullError
from cp_plugin.engine.inference.slots import Slots as Slots
from cp_plugin.engine.inference.slots import slots_for as slots_for
