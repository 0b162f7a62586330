"""Kernels for CPUs, compiled at start for the processor at hand; no compiler needs to be installed."""
