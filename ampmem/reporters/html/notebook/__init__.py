"""What a notebook shows: cards of values, and whole pages in a frame."""
