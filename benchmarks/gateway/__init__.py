"""Measures the cost of each API of the gateway to the router, next to an older checkout."""
