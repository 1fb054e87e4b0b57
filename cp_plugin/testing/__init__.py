"""Ranks on one machine, a float64 reference, and the comparison of every method with it."""
