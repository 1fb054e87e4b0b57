"""Values and plain rules about tokens: problems, layouts, masks, tiles, dtypes, scales."""
