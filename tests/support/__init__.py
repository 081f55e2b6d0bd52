"""What tests of several folders share: builders, runs, readers of what was written."""
