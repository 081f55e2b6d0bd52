"""Where the memory of two runs of changed code differs."""
