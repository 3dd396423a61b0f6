"""Triton kernels, imported as ``r2serve.kernels``.  Each file has a kernel and a wrapper."""
