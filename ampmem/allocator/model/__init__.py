"""The caching allocator itself: blocks in segments, best fit, splits, and what it asks of the driver."""
