"""Linear layers with quantised weights."""
