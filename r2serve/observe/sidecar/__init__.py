"""The sidecar: an HTTP service over this node's journals, read-only except for drills."""
