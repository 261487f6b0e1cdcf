"""Which of its addresses this machine has towards another."""

from __future__ import annotations

import socket

# an address for documentation: it is routed as the rest of the world is, and is nobody's
ELSEWHERE = "192.0.2.1"


def address_towards(host: str) -> str:
    """This machine's address as `host` sees it; IPv4 and IPv6. Raises OSError where no way leads there."""
    family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # nothing is sent: connecting a datagram socket only chooses the route
        probe.connect(place)
        own: str = probe.getsockname()[0]
        return own
