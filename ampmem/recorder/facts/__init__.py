"""What hooks see, written down cheaply: integers in lists, texts once, and where a tensor lies."""
