"""How a process signs the handles that it makes, and verifies those that it gets.

Keys are derived from secrets: that of the job, and that of the user or the one that `configure(secret=...)` has set in
its place. A handle has a tag under each key of its owner, and the reader accepts it for one valid tag under one of its
own keys. So the processes of a job accept each other's handles on any host and as any user. Processes outside of the
job (other jobs, children started by `multiprocessing`) accept them if they run as the same user or have the same
secret.

The tag of a handle is over its body, under a key that is derived from its card. So each of the many handles of a
message costs a hash of only its own few bytes.

    proof  {key's name 8 bytes, tag 16 bytes}, their number u8
"""

import hmac
import logging
import threading
from hashlib import blake2b

from skipper import trust
from skipper.dataplane.errors import ConfigurationError, DescriptorError

_LOG = logging.getLogger(__name__)

_LABEL = b"skipper data plane "
_NAME_BYTES = 8
_TAG_BYTES = 16
_ENTRY_BYTES = _NAME_BYTES + _TAG_BYTES
MOST_KEYS = 4
"""How many keys a process may have; a handle has an entry for each."""
_CARDS = 1024  # whose keys are kept


class Key:
    """One secret, as the data plane uses it. Its representation does not show the secret.

    Attributes:
        name: Eight bytes that identify it among others.
    """

    __slots__ = ("_cards", "_root", "name")

    def __init__(self, secret: bytes) -> None:
        # BLAKE2 throughout: the first use of OpenSSL, which `hmac` would make, costs milliseconds.
        self._root = blake2b(_LABEL, key=blake2b(secret).digest()).digest()
        self.name = blake2b(b"name", key=self._root, digest_size=_NAME_BYTES).digest()
        self._cards: dict[bytes, blake2b] = {}  # to be copied for each body, at half the cost of a new one

    def tag(self, card: bytes, body: bytes) -> bytes:
        """The tag of these halves of a handle, which only processes with the secret can make."""
        of_card = self._cards.get(card)
        if of_card is None:
            if len(self._cards) >= _CARDS:
                self._cards.clear()
            key = blake2b(card, key=self._root).digest()
            of_card = self._cards[card] = blake2b(key=key, digest_size=_TAG_BYTES)
        tag = of_card.copy()
        tag.update(body)
        return tag.digest()

    def derived(self, purpose: bytes) -> bytes:
        """32 bytes for another use, which reveal nothing about this one."""
        return blake2b(_LABEL + purpose, key=self._root, digest_size=32).digest()

    def __repr__(self) -> str:
        return "Key()"


class Keys:
    """The keys of this process, found when they are first needed. Thread-safe."""

    def __init__(self, own: bytes | None) -> None:
        """Use the secret that was configured; None for that of the user."""
        self._lock = threading.Lock()
        self._own = None if own is None else Key(own)
        self._job: bytes | None = None
        # As long as the process is in no job, a configured secret is the only one.
        self._known: tuple[Key, ...] = () if self._own is None else (self._own,)
        self._by_name = {key.name: key for key in self._known}

    def seal(self, card: bytes, body: bytes) -> bytes:
        """The second half of a handle with its proof.

        Raises:
            ConfigurationError: There is no secret with which to sign it.
        """
        known = self._present()
        entries = b"".join([key.name + key.tag(card, body) for key in known])
        return body + entries + len(known).to_bytes(1, "little")

    def open(self, card: bytes, sealed: bytes) -> bytes:
        """The second half of a handle without its proof, which is valid.

        Raises:
            ConfigurationError: There is no secret with which to verify handles.
            DescriptorError: It was altered, or was signed with secrets that this process does not know.
        """
        self._present()
        count = sealed[-1] if sealed else 0
        end = len(sealed) - 1 - count * _ENTRY_BYTES
        if not 0 < count <= MOST_KEYS or end < 0:
            raise DescriptorError("this buffer handle is cut short or damaged: it has no proof of its origin")
        body = sealed[:end]
        for at in range(end, len(sealed) - 1, _ENTRY_BYTES):
            key = self._by_name.get(sealed[at : at + _NAME_BYTES])
            if key is not None:
                if hmac.compare_digest(key.tag(card, body), sealed[at + _NAME_BYTES : at + _ENTRY_BYTES]):
                    return body
                raise DescriptorError("this buffer handle was altered or damaged: its proof does not match")
        raise DescriptorError(_FOREIGN)

    def derived(self, purpose: bytes) -> tuple[bytes, ...]:
        """32 bytes of each secret, for another use. A process that accepts handles of this one has one of them, too.

        Raises:
            ConfigurationError: There is no secret.
        """
        return tuple([key.derived(purpose) for key in self._present()])

    def _present(self) -> tuple[Key, ...]:
        """The present keys; the first is the job's, if there is one."""
        secret = trust.job_secret()
        if self._known and secret is self._job:
            return self._known
        with self._lock:
            keys = [] if secret is None else [Key(secret)]
            own = self._own or _key_of_user(needed=not keys)
            if own is not None and all(key.name != own.name for key in keys):
                keys.append(own)
            self._by_name = {key.name: key for key in keys}
            self._known, self._job = tuple(keys), secret
            return self._known


def _key_of_user(*, needed: bool) -> Key | None:
    try:
        return Key(trust.user_secret())
    except (OSError, ValueError) as error:
        if needed:
            raise ConfigurationError(
                f"buffer handles cannot be authenticated: {error}. Correct that, name a file of yours that holds 16 "
                f"bytes or more by {trust.SECRET_VARIABLE}, or call dataplane.configure(secret=...)"
            ) from None
        _LOG.debug("buffer handles are valid only within this job: %s", error)
        return None


_FOREIGN = (
    "this buffer handle was made under a secret that this process does not know: by a process of another job, of "
    "another user or on another host. Let both be processes of one job, give both the same by "
    "dataplane.configure(secret=...), or name a file with the same content on both sides by "
    f"{trust.SECRET_VARIABLE}"
)
