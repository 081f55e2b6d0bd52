"""Runs that other people published, and what the simulation makes of the same configurations."""
