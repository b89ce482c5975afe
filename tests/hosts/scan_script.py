"""Connects to ports of a machine, prints the open ones, and sends them garbage: ``scan_script.py ADDRESS PORT*``."""

import contextlib
import os
import socket
import sys

for port in map(int, sys.argv[2:]):
    with socket.socket() as connection, contextlib.suppress(OSError):
        connection.settimeout(2)
        connection.connect((sys.argv[1], port))
        print(port)
        connection.sendall(os.urandom(4096))
