"""Serving engines on the nodes of a lab, and load generators."""
