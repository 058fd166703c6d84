"""Prompts, their order in a run, and the tokenizer."""
