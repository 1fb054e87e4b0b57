"""Flags of the plugin beside Megatron's own."""
