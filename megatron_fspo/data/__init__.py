"""Prompts and the tokenizer: what goes into the policy, and in which order."""
