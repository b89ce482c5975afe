"""Everything that `control` raises.

```
ControlError
├── ActorError                     an endpoint raised; its actor lives on
├── SupervisionError               the actor or its process is dead, stopped or unreachable (also RuntimeError)
│   ├── LinkError                  every actor linked to a port is dead: nothing more will come
│   ├── ReplicaLostError           the replica of a service that had a request is gone
│   │   └── SessionLostError       and with it what a session had there
│   ├── ServiceEndedError          the service has failed or been stopped
│   └── StopTimeoutError           an actor did not end in good order       (also TimeoutError)
├── DeadlineError                  a wait took longer than its timeout      (also TimeoutError)
├── BackpressureError              an actor is too far behind to be sent more
├── ChannelClosedError             a receive on a closed channel
├── ActorDefinitionError           this class cannot be an actor            (also TypeError)
├── PayloadError                   a value cannot be pickled or unpickled   (also TypeError)
├── ForkedProcessError             this process is a forked copy of one of a job (also RuntimeError)
├── NoActorContextError            this thread belongs to no actor          (also RuntimeError)
├── ThreadLimitError               no thread can be started                (also RuntimeError)
├── EngineMissingError             no tensor engine is installed            (also ImportError)
├── TracingMissingError            OpenTelemetry is not installed           (also ImportError)
├── RendezvousError                ranks that wait for each other did not meet (also TimeoutError)
│   └── AbsentError                some of them have not come in time
├── RankFailedError                a rank of SPMD code was ended since another one had failed
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
│   ├── JobFailedError             a place of the job ended before its host was there
│   ├── NotElasticError            the engine gives no other place for a lost one (also NotImplementedError)
│   ├── JobLibraryError            the library that speaks with the engine is not installed (also ImportError)
│   └── TorchrunError              this process is no rank of torchrun, or its job is over
├── CertificateError               certificates that TLS cannot use         (also ValueError)
├── NamingError                    names, and who is behind them
│   ├── NameNotFoundError          nobody has this name                     (also LookupError)
│   ├── ServiceUrlError            this is no URL of a service              (also ValueError)
│   └── ResolverError              a resolver could not find out
├── RpcError                       a call through an `RpcClient`
│   ├── UnreachableError           no server could be reached: the call was not delivered
│   ├── ConnectionLostError        the call may have run, or not
│   ├── HandleExpiredError         the actor is gone; its successor was not asked
│   ├── NoSuchMethodError          the actor has no such method             (also AttributeError)
│   ├── MessageTooLargeError       arguments or a result beyond the limit   (also ValueError)
│   ├── OperationNotFoundError     the server knows no such operation       (also LookupError)
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
    """An endpoint raised an exception; the actor lives on and answers further calls.

    Attributes:
        actor_id: the actor whose endpoint raised.
        endpoint: the endpoint's name.
        summary: type and message of the remote exception.
        remote_traceback: the remote traceback as text, with those of all its causes. One that came as the cause of
            another `ActorError` has the text of that one, and leaves it to that one to show it.
        cause: the remote exception itself, with its ``__cause__`` and its notes, where it could be pickled there and
            unpickled here; else None.
        is_shown_by_another: whether it has come as a cause of another `ActorError`.
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
        """Whether the text of this error has its remote traceback; not where it is just the cause of another."""
        return bool(self.remote_traceback) and not (self.is_shown_by_another and self.__traceback__ is None)

    def __str__(self) -> str:
        remote = f"\n--- remote traceback ---\n{self.remote_traceback.rstrip()}" if self.shows_traceback() else ""
        return f"{self.actor_id}.{self.endpoint} raised {self.summary}{remote}"


class SupervisionError(ControlError, RuntimeError):
    """A call cannot be answered: the actor or its process is dead, stopped or unreachable.

    Attributes:
        failure: what is known about it, or None when the actor was stopped in good order.
        is_unhandled: whether it is certain that the actor did not begin to handle the message, so that no harm is done
            by sending it to another one. False where that is not known.
    """

    def __init__(self, message: str, failure: MeshFailure | None = None, *, is_unhandled: bool = False) -> None:
        super().__init__(message, failure)
        self.message = message
        self.failure = failure
        self.is_unhandled = is_unhandled

    def __str__(self) -> str:
        return self.message


class LinkError(SupervisionError):
    """Nothing more will come through a port, since every actor that it was linked to is dead.

    Attributes:
        failure: the first failure among theirs, or None when all of them were stopped in good order.
    """


class ReplicaLostError(SupervisionError):
    """A replica of a service is gone that had a request, which is not known to be safe to send to another.

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
    """The replica that a session was bound to is gone, with whatever the session had there; open another session."""


class ServiceEndedError(SupervisionError):
    """The service has failed or been stopped: nothing answers its requests any more."""


class StopTimeoutError(SupervisionError, TimeoutError):
    """An actor was stopped and did not end within the bound; it is given up, and what it was doing was cut short.

    The message names the actor, its process, what it was doing and for how long. Code that cannot be interrupted, since
    it waits in C, still runs on a thread of that process: stop the processes of the mesh to be rid of it.
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


class ForkedProcessError(ControlError, RuntimeError):
    """This process was forked from one that belongs to a job, and cannot do what takes that one's threads."""


class NoActorContextError(ControlError, RuntimeError):
    """The calling thread belongs to no actor, so that there is no context to speak of."""


class ThreadLimitError(ControlError, RuntimeError):
    """A limit of the system keeps this process from starting a thread that it needs; the message names the limit."""


class EngineMissingError(ControlError, ImportError):
    """What was asked for is done by a tensor engine, and none is installed."""


class TracingMissingError(ControlError, ImportError):
    """Spans are to be recorded, and OpenTelemetry is not installed."""


class RendezvousError(ControlError, TimeoutError):
    """Ranks that wait for each other did not meet; the message names those that are missing."""


class AbsentError(RendezvousError):
    """Some ranks have not come in time to where others wait for them.

    Attributes:
        missing: these ranks.
        size: how many were to come.
        timeout_s: how long was waited for them.
    """

    def __init__(self, missing: tuple[int, ...], size: int, timeout_s: float) -> None:
        super().__init__(missing, size, timeout_s)
        self.missing = missing
        self.size = size
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"ranks {list(self.missing)} of {self.size} have not come within {self.timeout_s:g} s"


class RankFailedError(ControlError):
    """A rank of an `SpmdActor` was ended, or not begun, since another one had failed: it raised, or is dead.

    What this rank itself raised then, when its collectives were aborted, is the ``__cause__`` where it is raised.

    Attributes:
        rank: which failed first.
        size: how many ranks there are.
        summary: its exception, class and message; or how it died.
        remote_traceback: of its exception, as text; empty where it died.
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
    """A folder cannot be synced: it changed meanwhile, or its target holds what is not to be replaced."""


class JoinError(ControlError):
    """A running job cannot be joined, or this one cannot be served to others."""


class JobNotFoundError(JoinError, LookupError):
    """There is no running job under this address: nobody serves it, or it has ended."""


class JobExistsError(JoinError, ValueError):
    """Another running job of this user is served under the same name."""


class AlreadyInJobError(JoinError, RuntimeError):
    """This process is part of a job already; `leave` leaves one that it has joined, `shutdown` ends a script's own."""


class RemoteHostError(JoinError, ConnectionError):
    """A connection file is that of a job on another host, which is joined by an address: ``tcp://HOST:PORT``."""


class UnsafeFileError(JoinError, PermissionError):
    """Other users could read a connection file, or could have written it; what it says is not used."""


class NamingError(ControlError):
    """Something is wrong with a name, or with finding out who has it."""


class NameNotFoundError(NamingError, LookupError):
    """Nobody has registered this name, or whoever had is gone."""


class ServiceUrlError(NamingError, ValueError):
    """This is no URL of a service, or not of the kind that is needed."""


class ResolverError(NamingError):
    """A resolver could not find out who has a name; it is not known whether anybody has."""


class RpcError(ControlError):
    """A call through an `RpcClient` did not come to an end of its own."""


class UnreachableError(RpcError):
    """No server could be reached, or none that takes our calls: the call has not been delivered to anybody."""


class ConnectionLostError(RpcError):
    """The connection broke while the call was on its way: it may have run, or not."""


class HandleExpiredError(RpcError):
    """The actor of a handle is gone. The call has not been delivered to whatever has its name now."""


class NoSuchMethodError(RpcError, AttributeError):
    """The actor has no method of this name that can be called."""


class MessageTooLargeError(RpcError, ValueError):
    """Arguments, or a result, are larger than what a server or a client takes in one message."""


class OperationNotFoundError(RpcError, LookupError):
    """The server knows no such operation: it was restarted, or nobody has asked for the result for too long."""


class OperationCancelledError(RpcError):
    """The operation was cancelled; its method may have run in part."""


class HostError(ControlError):
    """A host cannot be attached to the job, or its agent refuses what it was asked."""


class HostUnreachableError(HostError, ConnectionError):
    """The agent of a host does not answer, or the process that stands for the job there cannot be reached."""


class HostMismatchError(HostError):
    """The agent of a host runs another version of Python or of this library than the script."""


class HollowHostError(HostError, RuntimeError):
    """An actor of a hollow host does what takes a process of its own, or the process of such hosts has ended."""


class InsecureHostError(HostError, ValueError):
    """Without TLS others on the way can read and change what is said; for another machine that has to be wanted."""


class JobError(ControlError):
    """An engine that is to place the hosts of a job refuses, or cannot be reached."""


class JobFailedError(JobError):
    """A place of the job has failed or ended, so that its host will not come up.

    Attributes:
        rank: the place.
        reason: in the words of the engine.
        log: the end of what was written there; empty where there is nothing.
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
    """The engine of the job gives no other place for one that is lost: start the job anew."""


class JobLibraryError(JobError, ImportError):
    """The library that speaks with the engine is not installed; the message says how to get it."""


class TorchrunError(JobError):
    """The environment is not that of a rank of ``torchrun``, or the job of its ranks is over."""


class CertificateError(ControlError, ValueError):
    """Certificates are missing, or are not what TLS needs."""


class WireError(ControlError):
    """Something is wrong with the link to another process."""


class AuthenticationError(WireError):
    """The other side did not prove that it knows the secret, or one side does not take the other's certificate."""


class ProtocolError(WireError):
    """The other side sent something that no peer of this version sends."""


def names_of(kind: type[ControlError]) -> list[str]:
    """Of an error and of all that are special cases of it."""
    return [kind.__name__, *(name for special in kind.__subclasses__() for name in names_of(special))]
