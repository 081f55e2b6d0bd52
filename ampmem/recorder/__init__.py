"""Code that runs in the script's process while it is recorded: the session, its allocator source and its hooks."""
