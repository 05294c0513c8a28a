"""Caches of keys and values: accounts, locks, roll-back and files. Memory layouts and devices are the engines'."""
