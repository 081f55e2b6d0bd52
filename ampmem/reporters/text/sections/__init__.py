"""The sections of what is said of one recording."""
