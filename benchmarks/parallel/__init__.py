"""Models on several ranks beside one process; see `python -m benchmarks.parallel --help`."""
