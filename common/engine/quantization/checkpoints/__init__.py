"""Formats of checkpoints whose weights are quantised."""
