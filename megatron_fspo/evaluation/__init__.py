"""Evaluation without models or process groups: estimators, intervals, records and tables."""
