"""Summaries for people and for programs: text, pages, JSON and other tools' formats."""
