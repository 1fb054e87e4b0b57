"""Published experiments as Megatron commands.

cli      the ``cp-plugin example`` command
config   ``papers/*/config.yaml``: experiments, their variants, and Megatron's flags of each
show     the tables, and ``train.sh`` with these flags
"""
