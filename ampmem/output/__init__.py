"""How ampmem says something of its own: in a file, on a terminal, as a value that shows itself."""
