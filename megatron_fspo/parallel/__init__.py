"""Reductions over process groups, which are passed as arguments."""
