"""Reductions over process groups, which are arguments: one sequence on many ranks becomes one number."""
