"""How a script is run: in this process, or in fresh ones that are followed."""
