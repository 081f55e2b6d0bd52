"""A CUDA device that is not there: fake tensors that claim it, and a model of its allocator."""
