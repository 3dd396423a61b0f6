"""Readers of the journals and request logs of workers."""
