"""Weights and optimizer state between steps: Hugging Face weights, checkpoints, offloading."""
