"""A stranger who connects to gloo's ports without an end, and sends what a member could: ``hammer_script.py UID``.

Each line of its input is the address and the port of one. At the end of the input it prints how often it has tried, and
how many bytes it was told.
"""

import os
import select
import socket
import struct
import sys

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
places: list[tuple[str, int]] = []
held: list[tuple[socket.socket, int]] = []
tried, heard, left = 0, 0, b""
while True:
    if select.select([0], [], [], 0 if places else None)[0]:
        said = os.read(0, 4096)
        if not said:
            break
        *lines, left = (left + said).split(b"\n")
        told = [line.decode().split() for line in lines]
        places = (places + [(address, int(port)) for address, port in told])[-8:]
    for place in places:
        for number in range(4):
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(place)
            held.append((stranger, number))
            tried += 1
    for stranger, number in held:
        try:
            stranger.send(struct.pack("=q", number) + os.urandom(64))
            heard += len(stranger.recv(4096))
        except OSError:
            pass
    for stranger, _ in held[:-64]:
        stranger.close()
    del held[:-64]
print(tried, heard, flush=True)
