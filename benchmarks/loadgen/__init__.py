"""Measures the cost of the load generator of `baton bench`, and compares its figures with another's."""
