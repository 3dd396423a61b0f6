"""Latency and bandwidth of collectives: r2ccl, torch gloo, Open MPI, MPICH and the raw floor."""
