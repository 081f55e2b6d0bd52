"""Training scripts to run and to learn from: ``python -m ampmem.workloads.gpt --help``.

They are written as people write training loops, and nothing in them knows that it is observed.
"""
