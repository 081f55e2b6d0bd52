"""Private torch APIs that the simulated device uses."""
