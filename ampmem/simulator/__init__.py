"""Simulates a CUDA device that does not exist: fake tensors that claim it, and a model of its allocator."""
