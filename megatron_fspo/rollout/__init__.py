"""Sampling: the protocol of a rollout engine, the embedded engine, and the client of vLLM servers."""
