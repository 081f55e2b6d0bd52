"""Source ``cuda``: the CUDA caching allocator of a real GPU."""
