"""Models, tokenizers and data for runs without a Megatron-LM checkout."""
