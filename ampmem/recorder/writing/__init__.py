"""How facts and events become a step in the file."""
