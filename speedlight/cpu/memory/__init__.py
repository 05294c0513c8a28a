"""Memory that host and kernels share: arguments, items and scratch by name; the blocks of a cache."""
