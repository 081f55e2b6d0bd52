"""Training scripts to run and to learn from: ``python -m ampmem.workloads.gpt --help``.

They are ordinary training loops, without any code for ampmem.
"""
