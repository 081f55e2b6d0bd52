"""What all texts share: the words for numbers, and how a text fits where it is read."""
