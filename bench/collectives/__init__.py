"""Latency and bandwidth of collectives: r2ccl, torch gloo, Open MPI and the raw floor."""
