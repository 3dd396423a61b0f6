"""Peers of the collectives benchmark that are native programs."""
