"""Processes that were forked after the frameworks had begun to compute, in which they cannot go on.

Neither the threads of XLA nor those of torch survive a fork: what waits for one of them in the child waits for ever.
"""

from __future__ import annotations

import os

from ppl_bnn.errors import UnsupportedError, message

# The process in which a session was first opened. A child that was forked after it has this number from its parent.
_first: list[int] = []


def refuse_forked() -> None:
    """Note that this process computes, or refuse where it is the child of one that had computed before the fork.

    Raises
    ------
    UnsupportedError: a forked child.
    """
    if not _first:
        _first.append(os.getpid())
    elif _first[0] != os.getpid():
        raise UnsupportedError(
            message(
                "a process that was started afresh",
                f"process {os.getpid()}, which was forked from {_first[0]} after a fit there: the threads of JAX and "
                "torch do not survive a fork",
                "multiprocessing.get_context('spawn'), joblib, or forking before the first fit",
            )
        )
