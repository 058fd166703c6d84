"""The trainer: preparation, construction, training loop, and evaluation."""
