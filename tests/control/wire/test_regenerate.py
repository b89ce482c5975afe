from pathlib import Path

import pytest

from skipper.control.wire import regenerate

pytest.importorskip("grpc_tools", reason="needs grpcio-tools: make check compares the committed code as well")


def test_the_committed_code_is_what_the_proto_files_give() -> None:
    assert regenerate.difference() == []


def test_a_stale_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    regenerate.generate(tmp_path)
    (tmp_path / "link_pb2.py").write_text("# stale\n")
    (tmp_path / "left_over_pb2.py").write_text("")
    monkeypatch.setattr(regenerate, "GENERATED", tmp_path)
    assert regenerate.difference() == ["left_over_pb2.py", "link_pb2.py"]
