import copy
import pickle

import pytest

from skipper import control
from skipper.control import ActorError, ControlError, FailureKind, MeshFailure, SupervisionError
from skipper.control.model import errors
from skipper.control.model.shape import Extent
from skipper.control.runtime.replies import open_chain, pack_chain

EXPORTED = """
    AbsentError
    Accumulator Actor ActorDefinitionError ActorError ActorInstance ActorMesh AlreadyInJobError AuthenticationError
    BackpressureError CertificateError Channel ChannelClosedError ConnectionLostError Context ControlError Creator
    DeadlineError Endpoint EngineMissingError Extent FailureKind ForkedProcessError Future HandleExpiredError
    HollowHostError HostError HostMesh
    HostMismatchError HostUnreachableError InsecureHostError JobError JobExistsError JobFailedError JobLibraryError
    JobNotFoundError JoinError LinkError MeshFailure MessageTooLargeError NameNotFoundError NamingError
    NoActorContextError NoSuchMethodError NotElasticError OperationCancelledError OperationNotFoundError
    PayloadError Point Port PortReceiver ProcMesh Progress ProgressSubscription ProgressTask ProtocolError
    RankFailedError RemoteHostError RendezvousError
    ReplicaLostError
    ResolverError ResponseStream RpcError ScriptExitError ServedJob ServiceEndedError ServiceUrlError
    SessionLostError Settings Shape SpmdActor StopTimeoutError SupervisionError ThreadLimitError TorchrunError
    TracingMissingError
    UnreachableError UnsafeFileError ValueMesh WireError WorkspaceError as_endpoint attach_to_hosts
    concurrent_endpoint configure context current_actor_name current_rank current_size endpoint
    get_or_spawn_controller idempotent join leave on_progress serve_job shutdown subscribe this_host this_proc
    track_progress unhandled_fault_hook
"""
FAILURE = MeshFailure("mesh", "mesh[0]", Extent(("gpus",), (2,)).point(1), FailureKind.PROCESS, "it died")


def test_every_error_stands_in_the_tree_at_the_top_of_the_file() -> None:
    defined = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert all(issubclass(error, ControlError) for error in defined)
    drawing = errors.__doc__ or ""
    assert [error.__name__ for error in defined if error.__name__ not in drawing] == []
    assert {error.__name__ for error in defined} <= set(control.__all__)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.DeadlineError, TimeoutError),
        (errors.StopTimeoutError, TimeoutError),
        (errors.ActorDefinitionError, TypeError),
        (errors.PayloadError, TypeError),
        (errors.ForkedProcessError, RuntimeError),
        (errors.NoActorContextError, RuntimeError),
        (errors.ThreadLimitError, RuntimeError),
        (errors.EngineMissingError, ImportError),
        (errors.RendezvousError, TimeoutError),
        (errors.HostUnreachableError, ConnectionError),
        (errors.InsecureHostError, ValueError),
        (errors.CertificateError, ValueError),
    ],
)
def test_errors_are_also_what_python_calls_them(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ActorError("a[0]", "step", "ValueError: x", "Traceback", ValueError("x"))))
    assert (error.actor_id, error.endpoint, error.summary, error.remote_traceback) == (
        "a[0]",
        "step",
        "ValueError: x",
        "Traceback",
    )
    assert isinstance(error.cause, ValueError)
    assert error.__cause__ is error.cause
    ended = pickle.loads(pickle.dumps(errors.ScriptExitError("train.py", 3)))
    assert (str(ended), ended.status) == ("train.py ended by sys.exit(3)", 3)
    again = pickle.loads(pickle.dumps(SupervisionError("gone", FAILURE)))
    assert (str(again), again.failure) == ("gone", FAILURE)


def test_the_exported_names_are_those_of_this_list() -> None:
    assert sorted(control.__all__) == EXPORTED.split()
    assert all(hasattr(control, name) for name in control.__all__)


ARGUMENTS: dict[type[Exception], tuple[object, ...]] = {
    ActorError: ("a[0]", "step", "ValueError: x", "Traceback", ValueError("x")),
    errors.ReplicaLostError: ("service", 3, "it is gone", FAILURE),
    errors.SessionLostError: ("service", 3, "it is gone", FAILURE),
    errors.AbsentError: ((1, 3), 4, 0.5),
    errors.RankFailedError: (2, 4, "ValueError: x", "Traceback"),
    errors.ScriptExitError: ("train.py", 3),
    errors.JobFailedError: (2, "it was cancelled", "the end of its log"),
}


@pytest.mark.parametrize(
    "kind", [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ControlError)]
)
def test_every_error_is_the_same_after_a_journey(kind: type[ControlError]) -> None:
    failure = (FAILURE,) if issubclass(kind, SupervisionError) else ()
    error = kind(*ARGUMENTS.get(kind, ("what happened", *failure)))
    error.add_note("a note")
    for way in (lambda error: pickle.loads(pickle.dumps(error)), copy.copy, travelled):
        again = way(error)
        assert type(again) is kind
        assert (str(again), repr(again.args)) == (str(error), repr(error.args))
        assert {name: repr(value) for name, value in vars(again).items()} == {
            name: repr(value) for name, value in vars(error).items()
        }


def travelled(error: BaseException) -> BaseException | None:
    """As it is after it was raised by an endpoint and brought to the caller."""
    chain = pack_chain(error)
    again = open_chain(chain, "Traceback")
    if isinstance(again, ActorError):  # whoever passes one on shows it
        again.is_shown_by_another = False
    return again
