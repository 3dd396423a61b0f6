"""Topology of this node for rails, and problems that prevent rails from working."""
