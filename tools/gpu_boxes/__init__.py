"""The boxes of `make gpu`: problems, rows, tiles and tests on a GPU that is there for minutes (tools/gpu_report.py)."""
