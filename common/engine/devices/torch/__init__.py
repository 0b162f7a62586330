"""Torch's operators, on any device: what the kernels of others are compared with."""
