"""The public call: context-parallel attention for one layer, softmax or linear."""
