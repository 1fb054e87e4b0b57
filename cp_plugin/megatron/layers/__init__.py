"""The layers that Megatron's specs are given, and the process groups they use."""
