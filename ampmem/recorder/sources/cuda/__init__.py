"""The CUDA caching allocator of a real GPU as a source of events."""
