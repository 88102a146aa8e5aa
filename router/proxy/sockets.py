"""How many sockets this process may have, and errors that say it has no more of them."""

import logging
import resource
from errno import EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS

log = logging.getLogger("warmroute")

SPARE = 100
"""Files and sockets beside those of requests: log, probes, admin port, Redis."""
_OWN = frozenset({EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS})
"""No port, no file descriptor (of the process, of the machine), no buffer."""


def is_own(error: Exception) -> bool:
    """Whether no connection could be made because this machine has no socket left, whoever was to be reached.

    >>> is_own(OSError(EMFILE, "Too many open files")), is_own(ConnectionRefusedError())
    (True, False)
    """
    return isinstance(error, OSError) and error.errno in _OWN


def raise_limit(client_connections: int) -> None:
    """Let this process have as many sockets as it is allowed to; warn if ``client_connections`` need more.

    Systems start processes with a soft limit of 1,024, which is for programs that use ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * client_connections + SPARE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "this process may open %d files, %d clients (limits.client_connections) need %d: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE) or lower client_connections",
            hard,
            client_connections,
            wanted,
        )
