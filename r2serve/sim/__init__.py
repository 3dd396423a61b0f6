"""Whole jobs over the production core in simulated time, with faults and invariants."""
