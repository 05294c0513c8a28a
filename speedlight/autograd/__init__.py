"""Attention as PyTorch differentiates it: functions, operators, transforms, higher orders."""
