"""Triton kernels, one kernel and its wrapper a file.  Imported as ``r2serve.kernels``."""
