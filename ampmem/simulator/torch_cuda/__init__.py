"""Replaces ``torch.cuda`` for a GPU that does not exist."""
