"""The noise in S before a run: its own passes over the same responses, compared."""
