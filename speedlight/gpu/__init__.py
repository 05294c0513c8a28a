"""Kernels for NVIDIA GPUs, in Triton. Importing this package loads neither Triton nor PyTorch."""
