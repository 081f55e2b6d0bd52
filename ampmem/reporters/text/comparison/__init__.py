"""The sections of what is said of several recordings."""
