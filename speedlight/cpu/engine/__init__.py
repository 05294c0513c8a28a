"""The CPU engine: a Problem and its arrays become a schedule, arguments, and a run."""
