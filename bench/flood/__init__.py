"""Measures what a flood of connections at ports of rails costs collectives."""
