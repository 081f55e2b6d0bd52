"""Recordings and summaries in formats that other tools read."""
