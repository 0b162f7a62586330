"""Measures the harm that one client can do to the streams of another; see `python -m benchmarks.neighbours --help`."""
