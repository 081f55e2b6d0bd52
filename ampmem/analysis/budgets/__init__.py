"""Checks a run against budgets and a baseline."""
