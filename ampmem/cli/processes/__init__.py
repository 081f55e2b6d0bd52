"""Runs scripts, in this process or in child processes."""
