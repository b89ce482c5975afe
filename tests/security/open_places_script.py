"""A process that has open what others could reach, and what they could not: ``open_places_script.py FOLDER``.

Prints the ports, and holds all of it until its input ends.
"""

import os
import socket
import sys

folder = sys.argv[1]


def listening(address: str, mode: int | None = None) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(address)
    if mode is not None:
        os.chmod(address, mode)
    made.listen()
    return made


tcp = socket.socket()
tcp.bind(("0.0.0.0", 0))
tcp.listen()
tcp6 = socket.socket(socket.AF_INET6)
tcp6.bind(("::1", 0))
tcp6.listen()
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
abstract = listening(f"\0not-ours-{os.getpid()}")
wide = listening(f"{folder}/wide", 0o777)
os.chdir(folder)
near = listening("near", 0o777)
place = os.open(folder, os.O_PATH)
by = listening(f"/proc/self/fd/{place}/by", 0o777)
file = os.open(f"{folder}/file", os.O_RDONLY | os.O_CREAT, 0o600)
there = os.dup(place)
gone = listening(f"/proc/self/fd/{there}/gone")
os.dup2(file, there)
tight = listening(f"{folder}/tight", 0o700)
os.umask(0)
with open(f"{folder}/open", "w") as opened, open(f"/dev/shm/not-ours-{os.getpid()}", "w+b") as shm:
    shm.write(b"x")
    shm.flush()
    os.mkfifo(f"{folder}/fifo")
    fifo = os.open(f"{folder}/fifo", os.O_RDWR)
    hidden = os.open(f"{folder}/closed", os.O_WRONLY | os.O_CREAT, 0o600)
    print(tcp.getsockname()[1], tcp6.getsockname()[1], udp.getsockname()[1], flush=True)
    sys.stdin.read()
    os.unlink(shm.name)
