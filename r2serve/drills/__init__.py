"""Drills: faults injected on purpose into a rail of a running node, for a limited time."""
