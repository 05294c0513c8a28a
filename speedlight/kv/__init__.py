"""Caches of keys and values: accounts, locks, rollback and files. Engines own memory layouts and devices."""
