"""Context-parallel attention for Megatron-LM, NeMo and plain torch."""

from cp_plugin.attention import ContextParallel
from cp_plugin.problem import Options, Problem
from cp_plugin.protocol import Attend, Gradients, Partial, Provider

__version__ = "0.1.0"
__all__ = ["Attend", "ContextParallel", "Gradients", "Options", "Partial", "Problem", "Provider"]
