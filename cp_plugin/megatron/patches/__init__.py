"""Functions of Megatron that are replaced: one table with their contracts, probes, and a module for each subject."""
