"""How a script is run: in this process, or in child processes."""
