"""Measures the engine's share of a step beside the forward pass; see `python -m benchmarks.steps --help`."""
