"""Published experiments as Megatron commands: configurations, scripts, dry runs, and runs with narrow layers.

cli       the ``cp-plugin example`` command
config    parsing ``examples/papers/*/config.yaml``
command   an example, a variant, a length and the user's changes -> Megatron's flags
sizes     other numbers of GPUs: which fit, and shapes of grids, rings and head axes in proportion
scripts   ``train.sh`` and ``train.sbatch``
dry_run   the whole command through Megatron's parser, its process groups, and the planner's prediction
scaled    a few real steps on CPU ranks, compared with CP 1
training  Megatron's training loop in subprocesses, its log, and loss comparisons (also for the quickstart)
"""
