"""Moving local memory by way of a stage; ordinary memory stands for that of a GPU, which is copied by the same call."""

import time

import numpy as np
import pytest

from skipper.dataplane._copy import copy_rows
from skipper.dataplane.backends.base import Done, Transfer
from skipper.dataplane.backends.verbs.staging import HostStage, StagedTransfer
from skipper.dataplane.errors import TransferError
from skipper.dataplane.layout import Rows, as_rows, compile_box
from skipper.dataplane.memory import strided
from skipper.dataplane.regions import StridedRegion

pytest.importorskip("torch", reason="needs torch, which copies to and from device memory")


class Wire(Transfer):
    """Moves staged rows at once, or fails."""

    def __init__(self, rows: Rows, to_remote: bool, error: Exception | None = None) -> None:
        self.rows = rows
        self.to_remote = to_remote
        self.error = error

    def start(self, deadline: float, done: Done) -> None:
        if self.error is None:
            copy_rows(self.rows, self.to_remote)
        done(self.error)


def box(local: np.ndarray, remote: np.ndarray) -> tuple[list[list[int]], StridedRegion]:
    """Rows between an array of any strides and a contiguous one of the same shape."""
    here, there = strided(local, "local"), strided(remote, "remote")
    rows = compile_box(here.address, here.strides, there.address, there.strides, here.shape, here.itemsize, key=0)
    return rows, here


def moved(parts: list[tuple[np.ndarray, np.ndarray]], *, to_remote: bool) -> HostStage:
    boxes = [box(local, remote) for local, remote in parts]
    stage = HostStage(as_rows([row for rows, _ in boxes for row in rows]), [region for _, region in boxes])
    ended: list[BaseException | None] = []
    StagedTransfer(stage, Wire(stage.rows, to_remote), to_remote=to_remote).start(time.monotonic() + 10, ended.append)
    assert ended == [None]
    return stage


@pytest.mark.parametrize("to_remote", [False, True])
@pytest.mark.parametrize("key", [np.s_[:, :, :], np.s_[2:9, 1::2, 3:5], np.s_[5], np.s_[::3, 4]])
def test_a_box_arrives_and_what_lies_between_its_elements_is_left_alone(key, to_remote: bool) -> None:
    whole = np.arange(12 * 6 * 8, dtype=np.int32).reshape(12, 6, 8)
    before = whole.copy()
    remote = -np.ones_like(whole[key]) - np.arange(whole[key].size, dtype=np.int32).reshape(whole[key].shape)
    sent = remote.copy()
    moved([(whole[key], remote)], to_remote=to_remote)
    if to_remote:
        assert (remote == before[key]).all()
        assert (whole == before).all()
    else:
        assert (whole[key] == sent).all()
        whole[key] = before[key]
        assert (whole == before).all()


def test_neighbours_whose_rows_are_joined_share_a_stage() -> None:
    whole, remote = np.zeros(100, np.uint8), np.arange(100, dtype=np.uint8)
    stage = moved([(whole[:40], remote[:40]), (whole[40:70], remote[40:70])], to_remote=False)
    assert len(stage.rows) == len(stage.regions) == 1
    assert (whole[:70] == remote[:70]).all()
    assert not whole[70:].any()


def test_a_transfer_that_fails_leaves_the_local_memory_as_it_was() -> None:
    local, remote = np.zeros(8, np.uint8), np.ones(8, np.uint8)
    rows, region = box(local, remote)
    stage = HostStage(as_rows(rows), [region])
    error = TransferError("cut")
    ended: list[BaseException | None] = []
    StagedTransfer(stage, Wire(stage.rows, False, error), to_remote=False).start(0.0, ended.append)
    assert ended == [error]
    assert not local.any()
