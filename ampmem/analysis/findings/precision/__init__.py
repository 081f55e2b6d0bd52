"""Findings about what mixed precision saves, and why it does not save more."""
