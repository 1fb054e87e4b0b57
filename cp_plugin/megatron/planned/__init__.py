"""Planning a training command: from Megatron's flags to the planner's model, and ``--cp-provider auto``."""
