"""What the data plane can use on this machine, and what is missing for more: ``python -m skipper.dataplane.doctor``.

`examine` opens no listening socket, needs no privileges and changes nothing. A separate process with a deadline asks
all that could hang or crash (a foreign library, a driver): those programs are in `probes`.
"""

from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.examine import examine

__all__ = ["Check", "Examination", "Verdict", "examine"]
