"""Memory snapshots of PyTorch: read, put back to where their trace starts, and replayed through the model."""
