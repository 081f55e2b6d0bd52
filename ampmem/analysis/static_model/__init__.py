"""The bytes per parameter that a recipe says, against a run, and what explains the difference."""
