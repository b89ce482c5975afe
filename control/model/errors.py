"""The errors of `control`.

```
ControlError
├── ActorError                     an endpoint raised; its actor stays alive
├── SupervisionError               the actor or its process is dead, stopped or unreachable (also RuntimeError)
│   ├── LinkError                  every actor linked to a port is dead: nothing more will come
│   ├── ReplicaLostError           the replica of a service that had a request is gone
│   │   └── SessionLostError       and with it what a session had there
│   ├── ServiceEndedError          the service has failed or been stopped
│   └── StopTimeoutError           an actor did not end in time             (also TimeoutError)
├── DeadlineError                  a wait took longer than its timeout      (also TimeoutError)
├── BackpressureError              an actor has too many unhandled messages
├── ChannelClosedError             a receive on a closed channel
├── ActorDefinitionError           this class cannot be an actor            (also TypeError)
├── PayloadError                   a value cannot be pickled or unpickled   (also TypeError)
├── ForkedProcessError             this process is a forked copy of one of a job (also RuntimeError)
├── NoActorContextError            this thread belongs to no actor          (also RuntimeError)
├── ThreadLimitError               no thread can be started                (also RuntimeError)
├── EngineMissingError             no tensor engine is installed            (also ImportError)
├── TracingMissingError            OpenTelemetry is not installed           (also ImportError)
├── RendezvousError                ranks that wait for each other did not all arrive (also TimeoutError)
│   └── AbsentError                some of them have not arrived in time
├── RankFailedError                a rank of SPMD code was ended because another one failed
├── ScriptExitError                a script ended with another status than 0
├── WorkspaceError                 a folder cannot be synced
├── JoinError                      a running job cannot be joined, or not be served
│   ├── JobNotFoundError           there is no such job, or it has ended    (also LookupError)
│   ├── JobExistsError             another running job has this name        (also ValueError)
│   ├── AlreadyInJobError          this process is part of a job            (also RuntimeError)
│   ├── RemoteHostError            the job runs on another host             (also NotImplementedError)
│   └── UnsafeFileError            others could read or have written a file (also PermissionError)
├── HostError                      a host cannot be attached, or refuses
│   ├── HostUnreachableError       its agent does not answer                (also ConnectionError)
│   ├── HostMismatchError          its agent runs other versions than this script
│   ├── HollowHostError            a hollow host cannot do this, or its process has ended (also RuntimeError)
│   └── InsecureHostError          without TLS beyond this machine          (also ValueError)
├── JobError                       an engine that places hosts refuses, or cannot be reached
│   ├── JobFailedError             a place of the job ended before its host was up
│   ├── NotElasticError            the engine cannot replace a lost place (also NotImplementedError)
│   ├── JobLibraryError            the client library of the engine is not installed (also ImportError)
│   └── TorchrunError              this process is not a rank of torchrun, or its job has ended
├── CertificateError               certificates that TLS cannot use         (also ValueError)
├── NamingError                    names, and the actors that have them
│   ├── NameNotFoundError          no actor has this name                   (also LookupError)
│   ├── ServiceUrlError            this is not a URL of a service           (also ValueError)
│   └── ResolverError              a resolver could not resolve a name
├── RpcError                       a call through an `RpcClient`
│   ├── UnreachableError           no server could be reached: the call was not delivered
│   ├── ConnectionLostError        the call may have run, or not
│   ├── HandleExpiredError         the actor is gone; its successor was not called
│   ├── NoSuchMethodError          the actor has no such method             (also AttributeError)
│   ├── MessageTooLargeError       arguments or a result beyond the limit   (also ValueError)
│   ├── OperationNotFoundError     the server does not know the operation   (also LookupError)
│   └── OperationCancelledError    the operation was cancelled
└── WireError                      a link to another process
    ├── AuthenticationError        the other side does not know the job's secret
    └── ProtocolError              the other side sent what no peer sends
```
Bad arguments are plain `ValueError`, `TypeError`, `KeyError` or `IndexError`, raised before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skipper.control.model.failure import MeshFailure


class ControlError(Exception):
    """Root of the tree."""


class ActorError(ControlError):
    """An endpoint raised an exception; the actor stays alive and answers further calls.

    Attributes:
        actor_id: the actor whose endpoint raised.
        endpoint: the endpoint's name.
        summary: type and message of the remote exception.
        remote_traceback: the remote traceback as text, with those of all its causes. If this error is the cause of
            another `ActorError`, it has the text of that one, which shows it.
        cause: the remote exception itself, with its ``__cause__`` and its notes, if it could be pickled there and
            unpickled here; else None.
        is_shown_by_another: whether this error is a cause of another `ActorError`, which shows the traceback.
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
        self.is_shown_by_another = False
        self.__cause__ = cause

    @property
    def exception(self) -> BaseException | None:
        """The same as ``cause``, by the name that Monarch has for it."""
        return self.cause

    def shows_traceback(self) -> bool:
        """Whether the text of this error has its remote traceback; False if it is only the cause of another one."""
        return bool(self.remote_traceback) and not (self.is_shown_by_another and self.__traceback__ is None)

    def __str__(self) -> str:
        remote = f"\n--- remote traceback ---\n{self.remote_traceback.rstrip()}" if self.shows_traceback() else ""
        return f"{self.actor_id}.{self.endpoint} raised {self.summary}{remote}"


class SupervisionError(ControlError, RuntimeError):
    """A call cannot be answered: the actor or its process is dead, stopped or unreachable.

    Attributes:
        failure: what is known about it, or None if the actor was stopped as intended.
        is_unhandled: True if the actor certainly did not begin to handle the message, so that it is safe to send it to
            another one. False if that is not known.
    """

    def __init__(self, message: str, failure: MeshFailure | None = None, *, is_unhandled: bool = False) -> None:
        super().__init__(message, failure)
        self.message = message
        self.failure = failure
        self.is_unhandled = is_unhandled

    def __str__(self) -> str:
        return self.message


class LinkError(SupervisionError):
    """Nothing more will come through a port, because every actor that it was linked to is dead.

    Attributes:
        failure: the first of their failures, or None if all of them were stopped as intended.
    """


class ReplicaLostError(SupervisionError):
    """A replica of a service is gone while it had a request that may not be safe to send to another replica.

    Attributes:
        service: name of the service.
        replica: the number of the replica.
    """

    def __init__(
        self,
        service: str,
        replica: int,
        message: str,
        failure: MeshFailure | None = None,
        *,
        is_unhandled: bool = False,
    ) -> None:
        super().__init__(message, failure, is_unhandled=is_unhandled)
        self.args = (service, replica, message, failure)
        self.service = service
        self.replica = replica


class SessionLostError(ReplicaLostError):
    """The replica that a session was bound to is gone, with the session's state there; open another session."""


class ServiceEndedError(SupervisionError):
    """The service has failed or been stopped: nothing answers its requests any more."""


class StopTimeoutError(SupervisionError, TimeoutError):
    """An actor was stopped and did not end in time; what it was doing was interrupted, and the actor is given up.

    The message names the actor, its process, what it was doing and for how long. Code that cannot be interrupted,
    because it waits in C, still runs on a thread of that process: to end it, stop the processes of the mesh.
    """


class DeadlineError(ControlError, TimeoutError):
    """A wait took longer than its timeout; the result may still come."""


class BackpressureError(ControlError):
    """The mailbox of an actor is full, because it has too many unhandled messages; this message was not sent.

    `configure` sets how many messages one process may have unhandled at one actor, and how long a sender waits.
    """


class ChannelClosedError(ControlError):
    """The channel was closed; nothing more can be received from it."""


class ActorDefinitionError(ControlError, TypeError):
    """The class cannot be spawned as an actor; the message says why."""


class PayloadError(ControlError, TypeError):
    """An argument or result cannot be pickled, or what arrived cannot be unpickled here."""


class ForkedProcessError(ControlError, RuntimeError):
    """This process was forked from one that belongs to a job, and lacks the threads that this operation needs."""


class NoActorContextError(ControlError, RuntimeError):
    """The calling thread belongs to no actor, so it has no context."""


class ThreadLimitError(ControlError, RuntimeError):
    """A limit of the system keeps this process from starting a thread that it needs; the message names the limit."""


class EngineMissingError(ControlError, ImportError):
    """The operation needs a tensor engine, and none is installed."""


class TracingMissingError(ControlError, ImportError):
    """OpenTelemetry, which recording of spans needs, is not installed."""


class RendezvousError(ControlError, TimeoutError):
    """Ranks that wait for each other did not all arrive; the message names those that are missing."""


class AbsentError(RendezvousError):
    """Some ranks did not arrive in time where others wait for them.

    Attributes:
        missing: the ranks that did not arrive.
        size: how many ranks were expected.
        timeout_s: how long the others waited for them.
    """

    def __init__(self, missing: tuple[int, ...], size: int, timeout_s: float) -> None:
        super().__init__(missing, size, timeout_s)
        self.missing = missing
        self.size = size
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"ranks {list(self.missing)} of {self.size} have not arrived within {self.timeout_s:g} s"


class RankFailedError(ControlError):
    """A rank of an `SpmdActor` was ended, or did not start, because another rank raised or died.

    The exception that this rank itself raised, when its collectives were aborted, is the ``__cause__``.

    Attributes:
        rank: the rank that failed first.
        size: how many ranks there are.
        summary: class and message of its exception; or how it died.
        remote_traceback: the traceback of its exception, as text; empty if it died.
    """

    def __init__(self, rank: int, size: int, summary: str, remote_traceback: str = "") -> None:
        super().__init__(rank, size, summary, remote_traceback)
        self.rank = rank
        self.size = size
        self.summary = summary
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = self.remote_traceback.rstrip()
        remote = f"\n--- traceback of rank {self.rank} ---\n{text}" if text else ""
        return f"rank {self.rank} of {self.size} failed first, with {self.summary}{remote}"


class ScriptExitError(ControlError):
    """A script that an `SpmdActor` ran ended with another status than 0.

    Attributes:
        status: as it was given to ``sys.exit``.
    """

    def __init__(self, script: str, status: object) -> None:
        super().__init__(script, status)
        self.script = script
        self.status = status

    def __str__(self) -> str:
        return f"{self.script} ended by sys.exit({self.status!r})"


class WorkspaceError(ControlError):
    """A folder cannot be synced: it changed during the sync, or its target has content that must not be replaced."""


class JoinError(ControlError):
    """A running job cannot be joined, or this job cannot be served to other processes."""


class JobNotFoundError(JoinError, LookupError):
    """There is no running job at this address: no script serves it, or it has ended."""


class JobExistsError(JoinError, ValueError):
    """Another running job of this user is served under the same name."""


class AlreadyInJobError(JoinError, RuntimeError):
    """This process is part of a job already; `leave` leaves one that it has joined, `shutdown` ends a script's own."""


class RemoteHostError(JoinError, ConnectionError):
    """The connection file is that of a job on another host; join that job by its address, ``tcp://HOST:PORT``."""


class UnsafeFileError(JoinError, PermissionError):
    """Other users could read a connection file, or could have written it; its content is not used."""


class NamingError(ControlError):
    """A name is not valid, or cannot be resolved."""


class NameNotFoundError(NamingError, LookupError):
    """No process has registered this name, or the one that had is gone."""


class ServiceUrlError(NamingError, ValueError):
    """This is not a URL of a service, or not one of the kind that is needed."""


class ResolverError(NamingError):
    """A resolver could not resolve a name; it is not known whether any process has it."""


class RpcError(ControlError):
    """A call through an `RpcClient` did not end in a result or an exception of its method."""


class UnreachableError(RpcError):
    """No server could be reached, or none that accepts our calls: the call was not delivered."""


class ConnectionLostError(RpcError):
    """The connection broke during the call: it may have run, or not."""


class HandleExpiredError(RpcError):
    """The actor of a handle is gone. The call was not delivered to another actor that has its name now."""


class NoSuchMethodError(RpcError, AttributeError):
    """The actor has no method of this name that can be called."""


class MessageTooLargeError(RpcError, ValueError):
    """Arguments, or a result, are larger than what a server or a client accepts in one message."""


class OperationNotFoundError(RpcError, LookupError):
    """The server does not know the operation: it was restarted, or no client asked for the result for too long."""


class OperationCancelledError(RpcError):
    """The operation was cancelled; its method may have run partly."""


class HostError(ControlError):
    """A host cannot be attached to the job, or its agent refuses a request."""


class HostUnreachableError(HostError, ConnectionError):
    """The agent of a host does not answer, or the process that represents the job there cannot be reached."""


class HostMismatchError(HostError):
    """The agent of a host runs another version of Python or of this library than the script."""


class HollowHostError(HostError, RuntimeError):
    """An actor of a hollow host did what needs a process of its own, or the process of the hollow hosts has ended."""


class InsecureHostError(HostError, ValueError):
    """Without TLS anyone on the network path can read and change messages; to other machines it has to be allowed."""


class JobError(ControlError):
    """The engine that places the hosts of a job refuses, or cannot be reached."""


class JobFailedError(JobError):
    """A place of the job has failed or ended, so that its host will not come up.

    Attributes:
        rank: the place.
        reason: the reason, in the words of the engine.
        log: the end of the output of that place; empty if there is none.
    """

    def __init__(self, rank: int, reason: str, log: str = "") -> None:
        super().__init__(rank, reason, log)
        self.rank = rank
        self.reason = reason
        self.log = log

    def __str__(self) -> str:
        tail = f"\n--- the end of its log ---\n{self.log.rstrip()}" if self.log.strip() else ""
        return f"place {self.rank} of the job: {self.reason}{tail}"


class NotElasticError(JobError, NotImplementedError):
    """The engine of the job cannot replace a place that is lost: start the job again."""


class JobLibraryError(JobError, ImportError):
    """The client library of the engine is not installed; the message says how to install it."""


class TorchrunError(JobError):
    """The environment is not that of a rank of ``torchrun``, or the job of its ranks has ended."""


class CertificateError(ControlError, ValueError):
    """Certificates are missing or not valid for TLS."""


class WireError(ControlError):
    """The link to another process cannot be used."""


class AuthenticationError(WireError):
    """The other side did not prove that it knows the secret, or one side does not accept the other's certificate."""


class ProtocolError(WireError):
    """The other side sent something that no peer of this version sends."""


def names_of(kind: type[ControlError]) -> list[str]:
    """The names of an error class and of all its subclasses."""
    return [kind.__name__, *(name for special in kind.__subclasses__() for name in names_of(special))]
