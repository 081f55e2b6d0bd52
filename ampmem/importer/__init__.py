"""What PyTorch's own memory snapshots say, as recordings; neither torch nor a GPU is needed."""
