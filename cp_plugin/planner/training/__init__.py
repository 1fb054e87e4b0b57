"""Training: a model divided over devices, its memory, and the iteration around attention."""
