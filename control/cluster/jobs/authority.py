"""`Authority`: certificates for TLS between this script and the places of its jobs, made only for them."""

from __future__ import annotations

import atexit
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from skipper.control.cluster.jobs.folder import JobFolder
from skipper.control.model.errors import CertificateError, JobError, JobLibraryError
from skipper.control.wire.addresses import address_of_device
from skipper.control.wire.identity import Role

DAYS = 90
"""How long certificates are valid: longer than any job lasts."""

_lock = threading.Lock()
_ours: Path | None = None
"""The authority of this process. All hosts of a script need the same one, even those of later jobs."""


class Authority:
    """The authority that signs the certificates of a job's places, in the folder of the job.

    The places get an authority that signs for hosts only: a place makes its own certificate with it, and cannot pose as
    the script to the other places.

    Args:
        folder: of the job.
        address: the IP at which the script is reached, besides those of its machine.
    """

    def __init__(self, folder: JobFolder, address: str | None = None) -> None:
        self._folder = folder
        self._address = address

    @property
    def path(self) -> Path:
        """The folder of the authority for the places, which `control.cluster.hosts.certs.issue` takes.

        Raises:
            JobLibraryError: the library that makes certificates is not installed.
            JobError: it cannot be made.
        """
        path = self._folder.path / "authority"
        if not path.exists():
            made = _of_this_process(self._address) / "authority"
            from skipper.control.cluster.hosts.certs import delegate

            try:
                delegate(made, path, role=Role.HOST)
            except CertificateError as error:
                raise JobError(f"cannot make the certificate authority of the job: {error}") from error
        return path

    @property
    def certs(self) -> Path:
        """The folder with the certificates of this machine.

        Raises:
            JobLibraryError: the library that makes certificates is not installed.
        """
        return _of_this_process(self._address) / "script"


def _of_this_process(address: str | None) -> Path:
    global _ours
    try:
        from skipper.control.cluster.hosts.certs import issue, make_authority
    except ImportError as error:
        message = "certificates need a package: pip install 'skipper-mesh[hosts]' (insecure=True works without it)"
        raise JobLibraryError(message) from error
    with _lock:
        if _ours is None:
            folder = Path(tempfile.mkdtemp(prefix="skipper-authority-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            make_authority(folder / "authority", days=DAYS)
            issue(folder / "authority", folder / "script", own_addresses(address), role=Role.SCRIPT)
            _ours = folder
        return _ours


def own_addresses(address: str | None) -> list[str]:
    """The IPs for a certificate of this machine: a given one, and the IPv4 addresses of its devices."""
    found = (address_of_device(name) for _, name in socket.if_nameindex())
    return [host for host in (address, *found) if host is not None]
