"""Imports on first use: ``with importing:`` in front of each, so that a fork waits for its end.

A module that one thread is importing while another forks stays locked in the child, for ever, and half of it is there.
"""

import os
import threading

importing = threading.RLock()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=importing.acquire,
        after_in_parent=importing.release,
        after_in_child=importing.release,
    )
