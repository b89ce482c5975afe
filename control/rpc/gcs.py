"""`GcsResolver`: services on the virtual machines of a Google Cloud project, by their network tags.

Needs ``google-cloud-compute`` (the extra ``gcs``), which is imported for the first query.
"""

from __future__ import annotations

import threading
from typing import Any

from skipper.control.model.errors import NameNotFoundError, ResolverError, ServiceUrlError
from skipper.control.rpc.urls import ServiceUrl
from skipper.control.wire import addresses

METADATA_PREFIX = "skipper-service-"
"""Prefix of a service's name in the metadata key whose value is the service's URL on a machine."""

_TIMEOUT_S = 10.0
_RUNNING = 'status = "RUNNING"'


class GcsResolver:
    """Finds the running machines that have the service's name for a network tag.

    The machine's metadata has the URL of the service, under the key ``skipper-service-NAME``, such as
    ``grpc://:7000/controller``. Without a host in it, the host is the machine's first internal address.

    The example of `ChainResolver` shows one.

    Args:
        project: id of the project; None: that of the application default credentials.
        url: the URL of a service on machines without such metadata; ``{name}`` is replaced by the service's name.
        client: a ``compute_v1.InstancesClient`` to ask; None: one with the application default credentials.
        timeout: seconds to wait for an answer.
    """

    def __init__(
        self, project: str | None = None, *, url: str | None = None, client: Any = None, timeout: float = _TIMEOUT_S
    ) -> None:
        self._project = project
        self._url = url
        self._client = client
        self._timeout = timeout
        self._lock = threading.Lock()

    def resolve(self, name: str) -> list[str]:
        """The URLs of a service, in the order of zones and machines that Google gives.

        Raises:
            NameNotFoundError: (a `LookupError`) no machine has this tag, or none has the URL of the service.
            ResolverError: Google does not answer, or denies access, or a machine's metadata is not a URL.
            ImportError: ``google-cloud-compute`` is not installed.
        """
        machines = [machine for machine in self._running() if name in machine.tags.items]
        found = [url for machine in machines if (url := self._url_on(machine, name)) is not None]
        if not found:
            tagged = f"{len(machines)} with this tag, none of which says where" if machines else "none with this tag"
            raise NameNotFoundError(
                f"there is no {name!r} on the machines of the project {self._project!r}: {tagged} "
                f"({METADATA_PREFIX}{name} in its metadata does)"
            )
        return found

    def _running(self) -> list[Any]:
        try:
            import google.cloud.compute_v1 as compute
            from google.api_core.exceptions import GoogleAPIError
            from google.auth.exceptions import GoogleAuthError
        except ImportError as error:
            raise ImportError(
                "GcsResolver needs google-cloud-compute: pip install 'skipper-mesh[gcs]'", name=error.name
            ) from error
        try:
            with self._lock:
                if self._project is None:
                    self._project = _default_project()
                if self._client is None:
                    self._client = compute.InstancesClient()
            request = compute.AggregatedListInstancesRequest(project=self._project, filter=_RUNNING)
            zones = self._client.aggregated_list(request=request, timeout=self._timeout)
            return [machine for _, listed in zones for machine in listed.instances]
        except (GoogleAPIError, GoogleAuthError, OSError) as error:  # requests' errors are OSErrors
            raise ResolverError(f"the machines of the project {self._project!r} cannot be listed: {error}") from error

    def _url_on(self, machine: Any, name: str) -> str | None:
        items = {item.key: item.value for item in machine.metadata.items}
        template = items.get(METADATA_PREFIX + name, self._url)
        if template is None or not machine.network_interfaces:
            return None
        host = machine.network_interfaces[0].network_i_p or machine.network_interfaces[0].ipv6_address
        text = template.replace("{name}", name).replace("://:", f"://{addresses.at(host, 0).removesuffix('0')}", 1)
        try:
            return str(ServiceUrl.parse(text))
        except ServiceUrlError as error:
            raise ResolverError(
                f"the machine {machine.name} has no URL for {name!r} in its metadata: {error}"
            ) from error

    def __repr__(self) -> str:
        return f"GcsResolver({self._project!r})"


def _default_project() -> str:
    import google.auth

    _, project = google.auth.default()
    if not project:
        raise ResolverError("which project? The credentials name none: pass project=, or set GOOGLE_CLOUD_PROJECT")
    return str(project)
