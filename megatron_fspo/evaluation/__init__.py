"""Evaluation as arithmetic: estimators, intervals, records, tables. Knows no model and no process group."""
