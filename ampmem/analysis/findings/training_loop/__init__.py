"""Findings about how the script trains: what it keeps for longer than it has to."""
