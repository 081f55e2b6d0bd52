"""The names of torch that torch does not promise and that recording takes, or patches."""
