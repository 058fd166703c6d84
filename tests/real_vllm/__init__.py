"""Tests that talk to a real vLLM; VLLM_BIN names the program. A start is slow, so most share two servers."""
