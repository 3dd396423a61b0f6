"""Descriptors that a forked child must not keep.

A child that keeps a locked file or a listening socket of its parent makes the parent look alive
after its death: a log still counts as written, and clients connect and wait. The core closes its
own descriptors in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Holder(Protocol):
    """An object with descriptors of this process."""

    def left_behind(self) -> None:
        """Closes the descriptors in a forked child; must not take locks of the parent's threads."""
        ...


_HOLDERS: weakref.WeakSet[Holder] = weakref.WeakSet()


def close_in_children(holder: Holder) -> None:
    """Calls ``holder.left_behind()`` in every child forked while the holder exists."""
    _HOLDERS.add(holder)


def _in_child() -> None:
    for holder in list(_HOLDERS):
        holder.left_behind()


os.register_at_fork(after_in_child=_in_child)
