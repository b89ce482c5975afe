"""What a run stands on: GPUs, driver, torch, CUDA, UCX and what it can move. `python -m tests.gpu.facts` in the
environment prints a table; with a file as argument it writes the same as JSON."""

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipper import dataplane
from skipper.benchmarks.environment import gather_environment
from skipper.dataplane import DataplaneError, RDMABuffer
from tests.gpu import gates


def facts() -> dict[str, Any]:
    """Everything, as plain values; what cannot be had says why."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none: built without CUDA",
        "numpy": np.__version__,
        "GPUs": [],
    }
    why = gates.missing()
    if why is not None:
        found["no GPU because"] = why
    else:
        found["driver"] = gates.driver_version()
        found["NCCL"] = gates.missing_nccl() or ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(index)
            found["GPUs"].append(f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, sm_{seen.major}{seen.minor}")
        found["CUDA memory over UCX"] = _exported()
    for status in dataplane.backends():
        found[f"backend {status.name}"] = f"{', '.join(status.memory_kinds) or 'not usable'}: {status.reason}"
    return found | {"machine": gather_environment()}


def _exported() -> str:
    """Whether memory of a GPU can be registered and handed out, which needs UCX's transports for CUDA to load."""
    try:
        handle = RDMABuffer(torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")).serialize()
    except DataplaneError as error:
        return f"no: {error}"
    return f"yes: a handle of {len(handle)} bytes"


def main() -> int:
    """See above."""
    found = facts()
    for file in sys.argv[1:]:
        Path(file).write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    for name, value in found.items():
        if name != "machine":
            print(f"{name}: {'; '.join(value) or 'none' if isinstance(value, list) else value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
