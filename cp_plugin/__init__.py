"""Context-parallel attention for Megatron-LM, NeMo and plain torch."""

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.tree import Tree
from cp_plugin.core.values import Gradients, KeyValues, Partial, Queries
from cp_plugin.methods.protocol import Attend, Provider
from cp_plugin.renamed import install as install_old_names

install_old_names()

__version__ = "0.1.0"
__all__ = [
    "Attend",
    "ContextParallel",
    "Gradients",
    "KeyValues",
    "Options",
    "Partial",
    "Problem",
    "Provider",
    "Queries",
    "Tree",
]
