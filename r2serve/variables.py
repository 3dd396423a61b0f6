"""Variables that r2serve sets for the processes of a job, shared by several folders."""

from __future__ import annotations

BACKEND = "R2SERVE_DISTRIBUTED_BACKEND"
"""Value of the flag ``--distributed-backend``."""
RELAY = "R2SERVE_RELAY"
"""``127.x.y.0/NODE``: a relay carries the connections of this process and of its children."""
MANAGEMENT = "R2SERVE_MANAGEMENT_ADDRESS"
"""Real address of this node. r2serve sets it where the engine's variables have the virtual address
of a relay, so it is asked before them."""
