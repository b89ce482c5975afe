"""The bare device: one reliable connection between two processes, on pyverbs alone.

Two uses. The smoke tests show with it that the guest's device works at all, and its loop over memory registered
beforehand is the rate that the data plane is measured against. As a program it is the passive end: it prints where it
can be reached as one JSON line, reads the other end's line, and holds its memory until its input ends.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

READ = int(e.IBV_WR_RDMA_READ)
WRITE = int(e.IBV_WR_RDMA_WRITE)
PORT = 1
GID_INDEX = 1
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
RETRIES = 6  # 7 means for ever
ACK_TIMEOUT = 14  # 4.096 us * 2**14 = 67 ms
PIECE = 1 << 20  # of a larger transfer: the response to a longer READ overruns the receiver's queue


class End:
    """One end: `nbytes` of registered memory and a queue pair. After `connect` it can read and write the other's.

    The memory is an array's, as that of the transfers that it is compared with: where in a page it begins matters to a
    device made of software, which copies page by page.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.context = Context(name=device)
        self.domain = PD(self.context)
        self.array = np.zeros(nbytes, np.uint8)
        self.memory = MR(self.domain, nbytes, ACCESS, address=self.array.ctypes.data)
        opened = _completion_channels()
        self.channel = CompChannel(self.context)
        (self.events,) = _completion_channels() - opened
        self.completions = CQ(self.context, 256, None, self.channel)
        self.pair = QP(
            self.domain,
            QPInitAttr(
                qp_type=e.IBV_QPT_RC,
                scq=self.completions,
                rcq=self.completions,
                cap=QPCap(max_send_wr=200, max_recv_wr=1),
                sq_sig_all=0,
            ),
        )

    def address(self) -> dict[str, object]:
        return {
            "number": self.pair.qp_num,
            "gid": str(self.context.query_gid(PORT, GID_INDEX)),
            "memory": self.memory.buf,
            "key": self.memory.rkey,
        }

    def connect(self, peer: dict[str, object]) -> None:
        self.peer_memory, self.peer_key = peer["memory"], peer["key"]
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = ACCESS
        attributes.path_mtu = e.IBV_MTU_4096
        attributes.dest_qp_num = peer["number"]
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 16
        attributes.min_rnr_timer = 12
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=GID_INDEX)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = ACK_TIMEOUT, RETRIES, RETRIES
        self.pair.to_rts(attributes)

    def transfer(self, opcode: int, nbytes: int, *, timeout: float = 30.0) -> int:
        """Move `nbytes` between the beginnings of both memories; the status of the completion (0: all is well)."""
        return self.post(self.prepare(opcode, nbytes), timeout=timeout)

    def prepare(self, opcode: int, nbytes: int) -> list[SendWR]:
        """The requests for such a transfer, chained; can be posted any number of times."""
        requests: list[SendWR] = []
        for begin in range(0, nbytes, PIECE):
            last = begin + PIECE >= nbytes
            part = SGE(self.memory.buf + begin, min(PIECE, nbytes - begin), self.memory.lkey)
            flags = e.IBV_SEND_SIGNALED if last else 0
            request = SendWR(opcode=opcode, num_sge=1, sg=[part], send_flags=flags)
            request.set_wr_rdma(self.peer_key, self.peer_memory + begin)
            if requests:
                requests[-1].next_wr = request
            requests.append(request)
        return requests

    def repeat(self, opcode: int, nbytes: int) -> Callable[[], None]:
        """A call that does such a transfer and waits for it, from requests made once."""
        requests = self.prepare(opcode, nbytes)

        def transfer() -> None:
            assert self.post(requests) == 0

        return transfer

    def post(self, requests: list[SendWR], *, timeout: float = 30.0) -> int:
        """Post requests that are chained and wait; the status of the completion."""
        self.pair.post_send(requests[0])
        return self._wait(timeout)

    def _wait(self, timeout: float) -> int:
        armed = False
        while True:
            count, found = self.completions.poll(1)
            if count:
                return int(found[0].status)
            if armed:
                if not select.select([self.events], [], [], timeout)[0]:
                    raise TimeoutError(f"no completion within {timeout} s")
                self.channel.get_cq_event(self.completions)
                self.completions.ack_events(1)
            # What completed before this is no event: hence another look.
            self.completions.req_notify()
            armed = True


def _completion_channels() -> set[int]:
    """File descriptors of this process that are completion channels: pyverbs 44 does not tell."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


@contextmanager
def connected(device: str, peer_device: str, nbytes: int) -> "Iterator[tuple[End, subprocess.Popen[str]]]":
    """An end of this process, connected to one in a process of its own, which is given too."""
    command = [sys.executable, "-m", "tests.rdma_guest.bare_verbs", peer_device, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        end = End(device, nbytes)
        try:
            end.connect(json.loads(peer.stdout.readline()))
            peer.stdin.write(json.dumps(end.address()) + "\n")
            peer.stdin.flush()
            peer.stdout.readline()  # it is connected too
            yield end, peer
        finally:
            peer.stdin.close()


def main() -> None:
    end = End(sys.argv[1], int(sys.argv[2]))
    end.memory.write(b"peer", 4)
    print(json.dumps(end.address()), flush=True)
    end.connect(json.loads(sys.stdin.readline()))
    print("connected", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
