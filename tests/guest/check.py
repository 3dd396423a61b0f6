#!/usr/bin/env python3
"""Runs tests/guest/inside in a guest with two nodes of three rails.

check.py [OPTION OF guest.py...] [-- ARGUMENT OF pytest...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    options, arguments = sys.argv[1:], []
    if "--" in options:
        at = options.index("--")
        options, arguments = options[:at], options[at + 1 :]
    # Loads pytest_timeout as the only plugin, because the guest needs seconds to load each plugin.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    guest = [HERE / "guest.py", "--rails", "2x3", "--memory", "6G", *options, "--"]
    inside = ["-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", HERE / "inside"]
    command = [sys.executable, *guest, sys.executable, *inside, *arguments]
    os.execv(sys.executable, [str(word) for word in command])


if __name__ == "__main__":
    main()
