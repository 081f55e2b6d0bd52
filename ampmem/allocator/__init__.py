"""The CUDA caching allocator as a pure model: no GPU and no torch needed.

Functions carry the names that they have in PyTorch's ``c10/cuda/CUDACachingAllocator.cpp``.
"""
