"""The command line ``r2serve``."""

from __future__ import annotations

from r2serve.cli.main import main

__all__ = ["main"]
