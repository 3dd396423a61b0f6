"""A model served through a compressed hour of faults."""
