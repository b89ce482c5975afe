"""A process that writes a log of its messages as its input says: ``SENDER FIRST LAST begin|take`` in each line."""

import sys

from skipper.control.runtime.begin_log import BeginLog
from skipper.control.runtime.messages import Mail
from skipper.control.wire.messages import Call
from skipper.control.wire.process_ref import ProcessRef

log = BeginLog()
address = log.address
print(address.kernel, address.pid, address.fd, address.token, flush=True)
for line in sys.stdin:
    sender, first, last, what = line.split()
    for port in range(int(first), int(last) + 1):
        log.take(Mail(ProcessRef(sender, "", sender), Call(0, port)))
        if what == "begin":
            log.begin()
    print(flush=True)
