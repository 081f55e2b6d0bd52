"""The ranks of one job, merged."""
