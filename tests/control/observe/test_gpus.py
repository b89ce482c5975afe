"""What NVML says of GPUs, through a library with its functions, and what is shown where it says nothing.

The library is compiled from a few lines of C with the prototypes of nvml.h: machines with a GPU have the real one.
"""

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from skipper.control.observe import gpus
from skipper.control.observe.gpus import Gpu, GpuWatch, Nvml
from skipper.control.runtime.status_providers import Table
from tests.control.conftest import PATIENCE_S, wait_until

SOURCE = """
#include <stdio.h>
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int devices[2];
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &devices[index]; return index > 1; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  return snprintf(name, length, "Model %d", (int)((int *)device - devices)) < 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) { rates->gpu = 97; rates->memory = 3; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *info) {
  info->total = 80ULL << 30; info->used = 60ULL << 30; info->free = 20ULL << 30; return 0;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *heat) { *heat = 61; return sensor != 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *power) { *power = 412500; return device == &devices[1] ? 3 : 0; }
"""


def library(folder: Path, init: int = 0) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    path = folder / f"libnvml{init}.so"
    command = [compiler, "-shared", "-fPIC", f"-DINIT={init}", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    return str(path)


def test_each_gpu_is_read_and_what_it_does_not_tell_is_none(tmp_path: Path) -> None:
    assert Nvml(library(tmp_path)).gpus() == [
        Gpu(0, "Model 0", 97, 60 << 30, 80 << 30, 61, 412.5),
        Gpu(1, "Model 1", 97, 60 << 30, 80 << 30, 61, None),
    ]


def test_what_was_asked_last_is_a_table(tmp_path: Path) -> None:
    path = library(tmp_path)
    watch = GpuWatch(lambda: Nvml(path))
    wait_until(lambda: watch.table("vm") is not None, "the library has been asked")
    table = watch.table("vm")
    assert table is not None
    assert table.title == "GPUs"
    assert table.rows[0] == ("vm", 0, "Model 0", 97, 60 << 30, 80 << 30, 61, 412.5)


def test_without_a_library_or_a_driver_there_is_no_table_and_nobody_asks_again(tmp_path: Path) -> None:
    for name in ("libthere-is-none.so", library(tmp_path, init=9)):
        with pytest.raises(OSError, match=r"libthere|9"):
            Nvml(name)
        loads: list[str] = []

        def load(name: str = name, loads: list[str] = loads) -> Nvml:
            loads.append(name)
            return Nvml(name)

        watch = GpuWatch(load)
        assert watch.table("vm") is None
        wait_until(lambda watch=watch: watch._is_without, "it is known that there is none")
        assert [watch.table("vm") for _ in range(3)] == [None] * 3
        assert len(loads) == 1


def test_a_driver_that_hangs_holds_nobody_up_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Hanging(Nvml):
        def __init__(self) -> None:
            return

        def gpus(self) -> list[Gpu]:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return []

    watch = GpuWatch(Hanging)
    assert watch.table("vm") is None
    assert entered.wait(PATIENCE_S)
    assert watch.table("vm") is None
    monkeypatch.setattr(gpus, "SILENT_AFTER_S", 0.0)
    assert watch.table("vm") == Table("GPUs of a host whose driver does not answer", gpus._COLUMNS, [])
    go_on.set()
