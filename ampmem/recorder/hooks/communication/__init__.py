"""Where torch.distributed and what builds on it tell something of the memory that they take."""
