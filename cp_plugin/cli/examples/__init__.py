"""Published experiments as commands for Megatron: configurations, scripts, dry runs, and runs with narrow layers.

cli       ``cp-plugin example``: its flags, and which of the others they ask for
config    what ``examples/papers/*/config.yaml`` says
command   an example, a variant, a length and what the user changes -> Megatron's flags
sizes     other numbers of nodes, and few ranks of the same shape
scripts   ``train.sh`` and ``train.sbatch``
dry_run   the whole command through Megatron's parser, its process groups, and what the planner predicts
scaled    a few real steps on CPU ranks, against one without context parallelism
training  Megatron's loop in processes of its own, its log, and comparisons (also for the quickstart)
"""
