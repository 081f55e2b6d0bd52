"""Summaries as plain tables and sentences."""
