"""Registers attention's operators with PyTorch: what a process imports before it loads an exported program."""

from ..autograd import operators as operators
