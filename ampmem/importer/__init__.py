"""Imports PyTorch's own memory snapshots as recordings; needs neither torch nor a GPU."""
