"""A client of a status socket."""

import socket

DEADLINE_S = 60.0


def connected(path):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(DEADLINE_S)
    client.connect(path)
    return client


def received(client):
    """Return everything until the end."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)
