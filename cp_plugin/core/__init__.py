"""Core value types and token arithmetic: problems, layouts, masks, tiles, dtypes, scales."""
