"""`GpuWatch`: the GPUs of this host, as NVIDIA's management library (NVML) reports them; none without the library.

A driver that hangs blocks the thread that asks it. So a separate thread asks, and callers get the last answer.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from skipper.control.runtime.status_providers import Entry, Table

LIBRARY = "libnvidia-ml.so.1"
SILENT_AFTER_S = 5.0

_NAME_NBYTES = 96
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE of nvml.h."""
_TEMPERATURE_GPU = 0
"""NVML_TEMPERATURE_GPU of nvml.h."""
_COLUMNS = ("host", "GPU", "name", "busy %", "memory bytes", "of bytes", "°C", "W")


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, in the order of the table's columns; a value that it does not report is None.

    Attributes:
        index: its number for the driver.
        name: name of the model.
        busy_percent: in which part of the last moments a kernel ran.
        used_nbytes: used part of its memory.
        total_nbytes: size of its memory.
        temperature_c: in degrees Celsius.
        power_w: in watts.
    """

    index: int
    name: str | None
    busy_percent: int | None
    used_nbytes: int | None
    total_nbytes: int | None
    temperature_c: int | None
    power_w: float | None


class Nvml:
    """The library, loaded and initialized.

    Args:
        library: its name, or its path.

    Raises:
        OSError: it does not exist, or finds no driver.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(library)
        if (code := self._library.nvmlInit_v2()) != 0:
            raise OSError(f"{library} finds no driver: nvmlInit_v2 says {code}")

    def gpus(self) -> list[Gpu]:
        """All GPUs that it reports; waits for the driver."""
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> Gpu:
        device = ctypes.c_void_p()
        name = ctypes.create_string_buffer(_NAME_NBYTES)
        busy, memory, heat, power = _Utilization(), _Memory(), ctypes.c_uint(), ctypes.c_uint()
        by = ctypes.byref
        if self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), by(device)) != 0:
            return Gpu(index, None, None, None, None, None, None)
        has_name = self._library.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_NBYTES)) == 0
        has_busy = self._library.nvmlDeviceGetUtilizationRates(device, by(busy)) == 0
        has_memory = self._library.nvmlDeviceGetMemoryInfo(device, by(memory)) == 0
        has_heat = self._library.nvmlDeviceGetTemperature(device, ctypes.c_int(_TEMPERATURE_GPU), by(heat)) == 0
        has_power = self._library.nvmlDeviceGetPowerUsage(device, by(power)) == 0
        return Gpu(
            index,
            name.value.decode("utf-8", "replace") if has_name else None,
            busy.gpu if has_busy else None,
            memory.used if has_memory else None,
            memory.total if has_memory else None,
            heat.value if has_heat else None,
            power.value / 1000 if has_power else None,
        )


class GpuWatch:
    """The last known state of this host's GPUs. For any thread.

    Args:
        load: loads the library at the first call; an `OSError` says that there are no GPUs.
    """

    def __init__(self, load: Callable[[], Nvml] = Nvml) -> None:
        self._load = load
        self._nvml: Nvml | None = None
        self._lock = threading.Lock()
        self._asker: threading.Thread | None = None
        self._asked_s = 0.0
        self._is_without = False
        self._gpus: list[Gpu] = []

    def table(self, host: str) -> Table | None:
        """What is known now; None: nothing. Returns at once, and has the driver asked again."""
        with self._lock:
            silent_s = 0.0
            if self._asker is not None and self._asker.is_alive():
                silent_s = time.monotonic() - self._asked_s
            elif not self._is_without:
                self._asked_s = time.monotonic()
                self._asker = threading.Thread(target=self._ask, name="control-gpus", daemon=True)
                self._asker.start()
            gpus = self._gpus
        title = "GPUs" if silent_s < SILENT_AFTER_S else "GPUs of a host whose driver does not answer"
        rows: list[tuple[Entry, ...]] = [(host, *dataclasses.astuple(gpu)) for gpu in gpus]
        return Table(title, _COLUMNS, rows) if rows or silent_s >= SILENT_AFTER_S else None

    def _ask(self) -> None:
        try:
            self._nvml = self._nvml or self._load()
        except OSError:
            self._is_without = True
            return
        self._gpus = self._nvml.gpus()


watch = GpuWatch()
"""The watch of this process: see `control.observe.status` for the processes that have one."""
