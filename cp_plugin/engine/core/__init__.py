"""Core value types and token arithmetic: problems, layouts, masks, tiles, options, dtypes, scales."""
