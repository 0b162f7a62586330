"""Engines with and without a proposer; see `python -m benchmarks.speculation --help`."""
