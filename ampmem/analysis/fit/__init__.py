"""What fits on a GPU, and from which batch size on mixed precision saves."""
