"""Published experiments as Megatron commands.

cli      the ``cp-plugin example`` command: tables, and ``train.sh`` with an experiment's flags
config   ``papers/*/config.yaml``: experiments, their variants, and Megatron's flags of each
"""
