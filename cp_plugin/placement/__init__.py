"""Which tokens of a pack of documents each rank gets: a search in whole numbers, without tensors."""
