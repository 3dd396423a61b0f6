"""Drills: a rail of a running node is faulted on purpose, and undone when its time is over."""
