"""Native contenders of the collectives benchmark."""
