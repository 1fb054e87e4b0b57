"""Flags of the plugin beside Megatron's own, and what the planner makes of Megatron's."""
