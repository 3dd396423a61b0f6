"""Nodes and cables on one machine, and the faults of both: ground for tests, demo and bench."""
