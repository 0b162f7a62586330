"""What the engine adds to a forward pass; see `python -m benchmarks.steps --help`."""
