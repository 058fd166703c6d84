"""How much of S is noise: the run's own passes over the same responses, compared before the run."""
