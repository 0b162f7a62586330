"""Kernels for GPUs, in Triton. Import only where there is a GPU, or with Triton's interpreter (TRITON_INTERPRET=1)."""
