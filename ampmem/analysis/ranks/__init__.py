"""What the ranks of one job come to together."""
