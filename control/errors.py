"""Everything that `control` raises.

```
ControlError
├── ActorError                     an endpoint raised; its actor lives on
├── SupervisionError               the actor or its process is dead, stopped or unreachable
│   └── LinkError                  every actor linked to a port is dead: nothing more will come
├── DeadlineError                  a wait took longer than its timeout      (also TimeoutError)
├── BackpressureError              an actor is too far behind to be sent more
├── ChannelClosedError             a receive on a closed channel
├── ActorDefinitionError           this class cannot be an actor            (also TypeError)
├── PayloadError                   a value cannot be pickled or unpickled   (also TypeError)
├── NoActorContextError            this thread belongs to no actor          (also RuntimeError)
├── EngineMissingError             no tensor engine is installed            (also ImportError)
├── JoinError                      a running job cannot be joined, or not be served
│   ├── JobNotFoundError           there is no such job, or it has ended    (also LookupError)
│   ├── JobExistsError             another running job has this name        (also ValueError)
│   ├── AlreadyInJobError          this process is part of a job            (also RuntimeError)
│   ├── RemoteHostError            the job runs on another host             (also NotImplementedError)
│   └── UnsafeFileError            others could read or have written a file (also PermissionError)
└── WireError                      a link to another process
    ├── AuthenticationError        the other side does not know the job's secret
    └── ProtocolError              the other side sent what no peer sends
```
Bad arguments are plain `ValueError`, `TypeError`, `KeyError` or `IndexError`, raised before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from control.failure import MeshFailure


class ControlError(Exception):
    """Root of the tree."""


class ActorError(ControlError):
    """An endpoint raised an exception; the actor lives on and answers further calls.

    Attributes:
        actor_id: the actor whose endpoint raised.
        endpoint: the endpoint's name.
        summary: type and message of the remote exception on one line.
        remote_traceback: the remote traceback as text.
        cause: the remote exception itself where it could be pickled there and unpickled here, else None.
    """

    def __init__(
        self, actor_id: str, endpoint: str, summary: str, remote_traceback: str, cause: BaseException | None = None
    ) -> None:
        super().__init__(actor_id, endpoint, summary, remote_traceback, cause)
        self.actor_id = actor_id
        self.endpoint = endpoint
        self.summary = summary
        self.remote_traceback = remote_traceback
        self.cause = cause
        self.__cause__ = cause

    def __str__(self) -> str:
        trace = self.remote_traceback.rstrip()
        return f"{self.actor_id}.{self.endpoint} raised {self.summary}\n--- remote traceback ---\n{trace}"


class SupervisionError(ControlError):
    """A call cannot be answered: the actor or its process is dead, stopped or unreachable.

    Attributes:
        failure: what is known about it, or None when the actor was stopped in good order.
    """

    def __init__(self, message: str, failure: MeshFailure | None = None) -> None:
        super().__init__(message, failure)
        self.message = message
        self.failure = failure

    def __str__(self) -> str:
        return self.message


class LinkError(SupervisionError):
    """Nothing more will come through a port, since every actor that it was linked to is dead.

    Attributes:
        failure: the first failure among theirs, or None when all of them were stopped in good order.
    """


class DeadlineError(ControlError, TimeoutError):
    """A wait took longer than its timeout; what was waited for may still come."""


class BackpressureError(ControlError):
    """A message found no room in the mailbox of an actor that is too far behind; it has not been sent.

    `configure` sets how much one process may have unhandled at one actor, and how long a sender waits for room.
    """


class ChannelClosedError(ControlError):
    """The channel was closed, so that nothing can be received from it any more."""


class ActorDefinitionError(ControlError, TypeError):
    """The class cannot be spawned as an actor; the message says why."""


class PayloadError(ControlError, TypeError):
    """An argument or result cannot be pickled, or what arrived cannot be unpickled here."""


class NoActorContextError(ControlError, RuntimeError):
    """The calling thread belongs to no actor, so that there is no context to speak of."""


class EngineMissingError(ControlError, ImportError):
    """What was asked for is done by a tensor engine, and none is installed."""


class JoinError(ControlError):
    """A running job cannot be joined, or this one cannot be served to others."""


class JobNotFoundError(JoinError, LookupError):
    """There is no running job under this address: nobody serves it, or it has ended."""


class JobExistsError(JoinError, ValueError):
    """Another running job of this user is served under the same name."""


class AlreadyInJobError(JoinError, RuntimeError):
    """This process is part of a job already; `shutdown` ends that."""


class RemoteHostError(JoinError, NotImplementedError):
    """The job runs on another host. Joining across hosts is not there yet."""


class UnsafeFileError(JoinError, PermissionError):
    """Other users could read a connection file, or could have written it; what it says is not used."""


class WireError(ControlError):
    """Something is wrong with the link to another process."""


class AuthenticationError(WireError):
    """The other side did not prove that it knows the job's secret."""


class ProtocolError(WireError):
    """The other side sent something that no peer of this version sends."""
