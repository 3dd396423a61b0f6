"""Measures the network plugin for NCCL beside a raw socket, against its targets."""
