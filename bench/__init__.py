"""Benchmarks of r2serve against its peers, run by ``r2serve bench``."""
