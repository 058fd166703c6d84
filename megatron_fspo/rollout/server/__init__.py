"""Starts vLLM with the flags that the trainer needs, monitors it, and leaves no process behind."""
