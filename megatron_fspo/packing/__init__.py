"""Balanced micro-batches from sequence lengths, and packed tensors from sequences."""
