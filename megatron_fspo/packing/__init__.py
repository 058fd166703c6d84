"""Lengths become balanced micro-batches, sequences packed tensors: the only way to collate them."""
