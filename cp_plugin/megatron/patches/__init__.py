"""Functions of Megatron that are replaced: one table with their contracts, and a module for each subject."""
