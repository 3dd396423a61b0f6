"""Ports of a node: the interfaces, which of them become rails, and the pairing with peers."""
