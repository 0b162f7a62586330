"""Baton next to what users would run instead, on one machine in one run: see `__main__`."""
