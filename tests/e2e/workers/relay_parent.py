"""A parent of a relay, as the first process of an engine's node; the line `die` kills it.

A child has a copy of the parent's end of the relay's pipe, as a process forked by C code has.
Standard output gets a line of JSON once the relay is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from r2serve.relay.parent import RelayProcess, command

START_S = 120.0


def main() -> None:
    node, nodes, master, port = sys.argv[1:]
    relay = RelayProcess(command(int(node), int(nodes), master, int(port)))
    relay.wait_ready(START_S)
    pipe = relay._process.stdin.fileno()
    subprocess.Popen(
        ["sleep", "600"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[pipe],
    )
    sys.stdout.write(json.dumps({"prefix": relay.prefix}) + "\n")
    sys.stdout.flush()
    if sys.stdin.readline().strip() == "die":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
