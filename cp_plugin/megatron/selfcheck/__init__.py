"""A run checks itself: the first batches, sampled rows, bytes a step, the built model."""
