"""Environments that reply to the policy's turns: tools in worker processes, tool servers, and agents."""
