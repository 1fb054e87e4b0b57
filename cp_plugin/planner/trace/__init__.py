"""Tracing: run a method without data or peers, and simulate its events in time."""
