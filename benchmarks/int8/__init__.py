"""What int8 weights cost in quality and gain in speed: see `__main__`."""
