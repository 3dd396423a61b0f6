"""Ports of a node: interfaces, choice of rails, and pairing with peers."""
