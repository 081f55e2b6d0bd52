"""Whose tensor is it: modules, live objects, and the Python stacks of the script."""
