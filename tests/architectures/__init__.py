"""Architectures of `transformers`, and whether they are served exactly."""
