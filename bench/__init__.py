"""Benchmarks of r2serve beside other communication libraries, run by ``r2serve bench``."""
