"""Calibration of machine profiles: ``cp-plugin calibrate``."""
