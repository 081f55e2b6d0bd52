"""What runs in the user's process: one session, its allocator source and its hooks."""
