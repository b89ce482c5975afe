"""`ActorHandle`: one very actor, wherever its name may go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """One actor of an `ActorServer`; it may be passed around.

    `RpcClient.pin` gives it, and ``RpcClient(handle, Cls)`` is a client of it. When the actor is gone, because its
    server has ended, or because another has been given its name, calls raise `HandleExpiredError`, however many
    retries there are, and its successor never gets to see them.

    Attributes:
        url: where it lives.
        handle: which of all actors that have lived there it is.
    """

    url: str
    handle: str

    def resolve(self, name: str) -> list[str]:
        """Where it is, whatever it is called: a handle is a `Resolver`."""
        return [self.url]
