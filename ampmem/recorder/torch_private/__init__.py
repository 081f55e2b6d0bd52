"""Private torch APIs that recording uses, and torch functions that it patches."""
