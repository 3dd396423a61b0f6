"""Fault injection for people and tests: a lab of nodes and rails on one machine, and its faults."""
