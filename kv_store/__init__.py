"""Connectors that move KV blocks between engines."""
