"""GPUs, by Triton."""
