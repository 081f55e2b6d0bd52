"""Summaries for people and for programs."""
