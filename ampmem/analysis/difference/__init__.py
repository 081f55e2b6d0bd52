"""The difference between the memory of two runs of changed code."""
