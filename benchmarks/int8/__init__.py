"""Measures the cost of int8 weights in quality and their gain in speed: see `__main__`."""
