"""An hour of faults, compressed, under a served model."""
