"""Scratch memory: what kernels and libraries allocate besides the tensors that ops return."""
