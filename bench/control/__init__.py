"""Measurements of relays in a lab, without an engine: faults, ends, idle cost and new groups."""
