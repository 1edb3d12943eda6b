"""The socket that a server of ours listens on, and who can reach its address."""

import socket
from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Whether only this host can reach the address; an IPv6 address may stand in brackets."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def listen(address: str, waiting: int) -> socket.socket:
    """Return the socket of an address, `host:port` or `[host]:port`.

    Args:
        waiting: how many clients the kernel keeps until they are accepted.
    Raises:
        OSError: the address cannot be had.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where TCP is named: without it each page but the first of a connection takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), int(port)))
        listener.listen(waiting)
    except OSError:
        listener.close()
        raise
    return listener
