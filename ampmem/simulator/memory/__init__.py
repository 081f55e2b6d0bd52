"""What the simulated device holds at its peaks, and on which streams it works."""
