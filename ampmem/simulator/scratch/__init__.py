"""What kernels and libraries allocate beside the tensors that ops return."""
