"""Measures the cost of the router: in front of pods that answer at once, next to sglang-router in front of trivial
backends."""
