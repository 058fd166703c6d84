"""Samples from vLLM servers over HTTP. Nothing here imports vLLM."""
