"""Findings about precision copies: how many there are, and how long they live."""
