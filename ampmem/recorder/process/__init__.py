"""What a script may do to its process while it is recorded: fork, run threads."""
