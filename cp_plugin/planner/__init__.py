"""Planner: predicts the fastest context-parallel method from hardware profiles and the methods' own code."""
