"""How one sequence on many ranks becomes one number: reductions over process groups, which are arguments."""
