"""A training command as the planner sees it, and what the planner makes of it."""
