"""Published experiments as Megatron commands.

cli       the ``cp-plugin example`` command
config    parsing ``examples/papers/*/config.yaml``
command   an example, a variant, a length and the user's changes -> Megatron's flags
scripts   ``train.sh`` with these flags
training  Megatron's training loop in subprocesses, its log, and loss comparisons (for ``examples/quickstart.py``)
"""
