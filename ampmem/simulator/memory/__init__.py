"""The simulated device's memory at its peaks, and its streams."""
