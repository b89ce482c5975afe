import inspect
import pickle

import pytest

from skipper import torchstore
from skipper.torchstore import errors

SAMPLES = [
    errors.StoreError("something"),
    errors.StoreNotInitializedError("main"),
    errors.BlockingCallError("put"),
    errors.StoreTimeoutError("after 1 s: nothing came"),
    errors.KeyNotFoundError("a/b"),
    errors.VersionNotFoundError("a", 3, (4, 5)),
    errors.PartiallyPublishedError("a", 3, ("the shard of rank (1,)",)),
    errors.VersionExistsError("a", 3, 4),
    errors.LateShareError("a", 1, 4, 7, "rank 2 of 4 is gone"),
    errors.OutOfStepError("a", "rank 0 of 2 is at step 70, but rank 1 of 2 has not put step 6"),
    errors.MismatchError("a", "does not fit"),
    errors.LayoutMismatchError("a", "another shape"),
    errors.UnsupportedPlacementError("a", "Partial"),
    errors.BlockAlignmentError("a", (128, 128), (64, 0), (64, 128), "take other blocks"),
    errors.DestinationOverlapError("k", "a", "b"),
    errors.CoverageError("a", (((0, 2), (1, 1)),)),
    errors.DTypeMismatchError("a", "float against int"),
    errors.KindMismatchError("a", "an object"),
    errors.StateDictMismatchError("a", ("x",), ("y",)),
    errors.ShareMismatchError("a", "int here, float there"),
    errors.ShareDTypeMismatchError("a/w", "rank 1 put int32[4] and not float32[4] as rank 0 did", (1,), (0,)),
    errors.ShareLayoutMismatchError("a/w", "rank 1 put int32[4] and not int32[6] as rank 0 did", (1,), (0,)),
    errors.ReplicaMismatchError("a", "w", ((0, 2), (1, 1)), (0, 3)),
    errors.AdapterBaseMismatchError("a", 3, ("b", 1), ("b", 2)),
    errors.LoadPlanMismatchError("a", ("w is float32[4], recorded as float32[5]",)),
    errors.LoadPlanFormatError("plan.jsonl", 3, "no JSON"),
    errors.RecordingError("w", "it raised ValueError"),
    errors.SourceChangedError("a", 3, "it moved"),
    errors.ChecksumError("a/w", 3, (0, 64), (64, 64), 2),
    errors.NotCertifiedError("a", 3, "it was put without certify=True"),
    errors.ProofError("this is not version 3", None, "w", "qkv", ((0, 0), (16, 256))),
    errors.CertificateFormatError("policy.certificate", 3, "no JSON"),
    errors.SecondSetError("this engine writes to its weights"),
    errors.PublisherLostError("a", 3, "process 7 has died"),
    errors.VolumeLostError("0", "process 7 has died"),
    errors.VolumeFullError("0", 10, 5),
    errors.JournalError("not enough memory for the journal"),
    errors.ControllerLostError("the store's controller is gone"),
    errors.MirrorError("file:///m", "it is empty"),
    errors.MirrorFormatError("file:///m/1", "no JSON"),
    errors.MirrorSignatureError("file:///m/1", "it is signed by somebody else"),
    errors.MirrorRolledBackError("file:///m/latest", 3, 4),
    errors.MirrorDamagedError("file:///m/c/1", "it holds other bytes"),
    errors.MirrorUnreachableError("file:///m", "it does not answer"),
    errors.StoreRendezvousError("rank 1 did not come"),
    errors.RankEnvironmentError("RANK is not set"),
    errors.StrategyError("no volume"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_the_way_between_processes(error: errors.StoreError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_of_the_tree_is_sampled_and_exported() -> None:
    tree = {value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, errors.StoreError)}
    assert tree == {type(error) for error in SAMPLES}
    assert {error.__name__ for error in tree} <= set(torchstore.__all__)


def test_the_tree_at_the_top_of_the_file_names_every_error() -> None:
    assert errors.__doc__ is not None
    for error in SAMPLES:
        assert type(error).__name__ in errors.__doc__


def test_errors_are_also_what_python_calls_them() -> None:
    for error, kind in [
        (errors.KeyNotFoundError, KeyError),
        (errors.PartiallyPublishedError, KeyError),
        (errors.StoreTimeoutError, TimeoutError),
        (errors.LayoutMismatchError, ValueError),
        (errors.DTypeMismatchError, TypeError),
        (errors.KindMismatchError, TypeError),
        (errors.VersionExistsError, ValueError),
    ]:
        assert issubclass(error, kind)


def test_a_hole_is_described_by_key_and_box() -> None:
    assert str(errors.CoverageError("w", (((0, 2), (4, 1)),))) == (
        "'w': no source holds [offsets (0, 2), shape (4, 1)]"
    )
