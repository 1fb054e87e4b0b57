"""Functions of Megatron that are replaced: one table, fingerprints, and a module for each subject."""
