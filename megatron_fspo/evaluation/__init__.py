"""Evaluation as arithmetic: estimators, intervals over problems, records, tables. Needs numpy only."""
