"""Reading what the workers recorded."""
