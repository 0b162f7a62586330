"""Formats of quantised weights."""
