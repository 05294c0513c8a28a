"""The CPU engine: kernels are Python programs that write machine code."""
