"""vLLM's HTTP client, which also pauses the server while its workers change weights."""

from __future__ import annotations

import time
from typing import Literal

from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

PauseMode = Literal["wait", "keep", "abort", "step"]


class PausingHTTPClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]  # vLLM is not there to be typed
    """vLLM's client, with ``pause`` and ``resume``: the trainer calls these of any client before and after the load.

    The server runs with ``VLLM_SERVER_DEV_MODE=1``.

    Args:
        base_url: The URL of the server.
        mode: What happens to requests in progress. "wait" lets them finish, so that each answer comes from one version;
            "keep" continues them with the new weights; "abort" ends them. "step" pauses nothing: the weights change
            between two steps of the engine, which continues the requests with the new weights. That is meant for
            ``background``, where the change takes no time.
        recompute: Whether requests that continue, with "keep" or "step", compute again what they had computed with the
            old weights. Otherwise they reuse it, which takes no time, and new requests may find it in the prefix cache.
        timeout: Timeout of each request, in seconds.
    """

    def __init__(
        self, base_url: str, *, mode: PauseMode = "wait", recompute: bool = True, timeout: float = 300.0
    ) -> None:
        super().__init__(base_url, timeout)
        self._mode = mode
        self._recompute = recompute

    def wait_until_ready(self, timeout: float) -> None:
        """Wait for a server that is starting.

        Raises:
            TimeoutError: It does not answer within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server at {self.base_url} does not answer after {timeout:g} s")
            time.sleep(0.5)

    def pause(self) -> None:
        """Let no new request begin; returns when none runs, and nothing from the old weights is cached."""
        if self._mode == "step":
            return
        self._post(f"pause?mode={self._mode}&clear_cache=true")

    def resume(self) -> None:
        """Serve again; kept requests compute again what they had computed with the old weights."""
        if self._mode in ("keep", "step") and self._recompute:
            self._post("reset_prefix_cache?reset_running_requests=true")
        if self._mode != "step":
            self._post("resume")

    def _is_ready(self) -> bool:
        import requests  # at the first use, as vLLM does

        try:
            return bool(requests.get(f"{self.base_url}/health", timeout=5).ok)
        except (requests.ConnectionError, requests.Timeout):
            return False
