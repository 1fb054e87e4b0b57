"""Models and data for runs without a Megatron-LM checkout."""
