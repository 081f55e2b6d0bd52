"""What lies above the tensors: reserved memory, addresses, and running out of it."""
