"""Sampler against trainer: how far their log-probs of the same tokens differ, why, and what follows."""
