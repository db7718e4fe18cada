"""Whether the other end of an ssh's connection lives, as far as TCP knows.

After a cut TCP tries again after twice the last pause, each side by itself: for up to as long as the cut was, a host
may hear nothing although its own words arrive. What it has sent is acknowledged then, and that says as much.
"""

from __future__ import annotations

import contextlib

_TABLES = "/proc/net/tcp", "/proc/net/tcp6"
_ESTABLISHED = "01"


def unacknowledged_bytes(connection: str) -> int | None:
    """How much of what was sent has not been acknowledged. None: that is not known.

    Args:
        connection: as sshd tells it in SSH_CONNECTION: the client's address and port, and the server's.

    Source: proc_net_tcp.txt of Linux, https://docs.kernel.org/networking/proc_net_tcp.html: `tx_queue` of a connection.
    """
    words = connection.split()
    if len(words) != 4 or not (words[1].isdigit() and words[3].isdigit()):
        return None
    ends = f"{int(words[3]):04X}", f"{int(words[1]):04X}"
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                columns = line.split()
                its = columns[1].rpartition(":")[2], columns[2].rpartition(":")[2]
                if its == ends and columns[3] == _ESTABLISHED:
                    return int(columns[4].partition(":")[0], 16)
    return None
