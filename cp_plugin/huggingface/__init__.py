"""Hugging Face transformers: distribute a model's attention over the ranks of a ``ContextParallel``.

    cp = cp_plugin.ContextParallel("striped", group=group)
    huggingface.apply(model, cp)
    loss = model(**huggingface.shard(cp, input_ids)).loss     # this rank's summand of the mean over all tokens

The ranks' losses add up to the loss, and their gradients to its gradient. DistributedDataParallel and FSDP average
over ranks: multiply the loss by their number. Use ``shard_tree`` instead of ``shard`` for packed sequences with common
prefixes. Needs transformers 5: pip install 'cp-plugin[huggingface]'.
"""

from cp_plugin.huggingface.apply import apply, undo
from cp_plugin.huggingface.batch import IGNORED, shard, shard_tree
from cp_plugin.huggingface.probabilities import hidden_states, log_probabilities
from cp_plugin.huggingface.rows import Collator

__all__ = ["IGNORED", "Collator", "apply", "hidden_states", "log_probabilities", "shard", "shard_tree", "undo"]
