"""What this machine offers the data plane, and what keeps it from more: ``python -m skipper.dataplane.doctor``.

`examine` looks; it opens no listening socket, needs no privileges and changes nothing. Whatever could hang or crash (a
foreign library, a driver) is asked in a process of its own, with a deadline: those programs are in `probes`.
"""

from skipper.dataplane.doctor.checks import Check, Examination, Verdict
from skipper.dataplane.doctor.examine import examine

__all__ = ["Check", "Examination", "Verdict", "examine"]
