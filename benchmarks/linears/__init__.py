"""Linear layers on compiled CPU kernels, for few rows to many."""
