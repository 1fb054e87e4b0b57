"""Figures of a machine, measured on it: ``cp-plugin calibrate``."""
