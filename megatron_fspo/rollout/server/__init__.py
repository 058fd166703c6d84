"""Starts vLLM with the flags that this trainer needs, watches it, and leaves no process behind."""
