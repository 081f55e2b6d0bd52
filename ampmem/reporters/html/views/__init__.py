"""What the page says, as typed values, in the words of ``ampmem show``."""
