"""The lab: nodes with rails on a single machine, with real network faults, for tests and demos."""
