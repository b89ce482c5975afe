"""``python -m tests.tensor_engine.opinfo``: every operation of PyTorch's own database, on a mesh and in the script.

    python -m tests.tensor_engine.opinfo                      # all of them
    python -m tests.tensor_engine.opinfo --ops prod nn.functional.ctc_loss --samples 20

Each sample of an operation runs in the script, and on the workers of a mesh: as a function, in place, with ``out=``,
and with gradients, whose backward runs under ``activate`` or after it. A table at the end says what was not equal:

    refused   a `TensorEngineError` says why
    opaque    any other exception, which the script's own torch does not raise
    differs   another value, shape, dtype or structure
    hung      no answer in time

The status is 0 if what is refused stands in `REFUSED`, everything in there is refused, and all else is equal. What the
script's own torch refuses, or does in two ways, is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import itertools
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from skipper import control, tensor_engine
from skipper.control import ProcMesh, this_host
from skipper.tensor_engine import RemoteError, Tensor, TensorEngineError, fetch_shard, to_mesh

SAMPLES = 6
"""How many samples of each operation are tried, unless told: spread over all that it has."""

REFUSED = frozenset(
    {
        # The shape of the result depends on values, and there is none to be said beforehand.
        "argwhere",
        "bincount",
        "index_put",  # the gradient of values that are put where a mask of bools is
        "masked_select",
        "nonzero",
        "unique",
        "unique_consecutive",
        # Tensors of a mesh are strided.
        "sparse.mm.reduce",
        "sparse.sampled_addmm",
        "to_sparse",
    }
)
"""What cannot be done, and is refused with words; docs/tensor_engine.md has the reasons."""

_MOST_SAMPLES = 400
"""Of operations with more, the first so many are looked at."""

PATIENCE_S = 60.0
"""Bound on a fetch of what takes milliseconds."""

_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""The first of these that an operation takes."""

_UNDEFINED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that return memory as it is: only shapes and dtypes are compared."""


class Verdict(enum.IntEnum):
    """What became of an operation; of several, the worst counts."""

    SKIPPED = 0
    EQUAL = 1
    REFUSED = 2
    OPAQUE = 3
    DIFFERS = 4
    HUNG = 5


class NoAnswerError(BaseException):
    """An operation takes too long. Not an `Exception`, so that nothing on its way takes it for one of torch's."""


@dataclass(slots=True)
class Finding:
    """What became of one operation.

    Attributes:
        name: of the operation.
        verdict: the worst.
        why: for each kind of run and verdict that is not equal, what was said.
        runs: how many were equal.
    """

    name: str
    verdict: Verdict = Verdict.SKIPPED
    why: dict[tuple[str, Verdict], str] = field(default_factory=dict)
    runs: int = 0

    def note(self, variant: str, verdict: Verdict, why: str = "") -> None:
        """One more run."""
        self.verdict = max(self.verdict, verdict)
        if verdict > Verdict.EQUAL:
            self.why.setdefault((variant, verdict), why)
        else:
            self.runs += verdict == Verdict.EQUAL

    @property
    def is_as_documented(self) -> bool:
        """Whether it is refused where that is documented, and fine where it is not."""
        if self.name in REFUSED:
            return self.verdict is Verdict.REFUSED
        return self.verdict <= Verdict.EQUAL

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict.name.lower()} ({self.runs} runs were equal)"]
        lines += [f"    {variant}: {verdict.name.lower()}: {why}" for (variant, verdict), why in self.why.items()]
        return "\n".join(lines)


@functools.cache
def database() -> dict[str, Any]:
    """The operations by their names. Torch's module takes seconds, and changes settings of the process that has it."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.full_name: op for op in op_db}


def sampled(count: int) -> list[str]:
    """So many of them, evenly spread."""
    known = list(database())
    return [known[index * len(known) // count] for index in range(count)]


def examine(name: str, procs: ProcMesh, *, samples: int = SAMPLES) -> Finding:
    """Run an operation of a name on a mesh and in the script.

    Raises:
        KeyError: there is no operation of that name.
    """
    op = database()[name]
    finding = Finding(name)
    dtype = next((each for each in _DTYPES if op.supports_dtype(each, "cpu")), None)
    if dtype is None:
        return finding
    torch.manual_seed(0)
    has_gradient = bool(op.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    known = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=has_gradient), _MOST_SAMPLES))
    step = max(1, len(known) // samples)
    for sample in known[::step][:samples]:
        for variant, run in _variants(op, sample, has_gradient):
            _compare(finding, variant, run, procs, are_values_defined=op.name not in _UNDEFINED)
    return finding


Run = Callable[["_Side"], Any]
"""Runs a sample on one side, and returns a pytree of results."""


class _Side:
    """Where a sample runs: in the script, or on a mesh."""

    def __init__(self, mesh: ProcMesh | None) -> None:
        self._mesh = mesh
        self.is_of_mesh = mesh is not None

    def inputs(self, what: Any) -> Any:
        """A copy of a pytree, with its tensors on this side; what is one tensor stays one."""
        memo: dict[int, torch.Tensor] = {}

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in memo:
                source = tensor.detach()
                copied = source.clone() if self._mesh is None else to_mesh(source, self._mesh)
                memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        return pytree.tree_map_only(torch.Tensor, one, what)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Where operations are this side's."""
        return contextlib.nullcontext() if self._mesh is None else self._mesh.activate()


def _variants(op: Any, sample: Any, has_gradient: bool) -> Iterator[tuple[str, Run]]:
    given = (sample.input, tuple(sample.args), dict(sample.kwargs))

    def plain(side: _Side) -> Any:
        first, args, kwargs = side.inputs(given)
        with side.active(), torch.no_grad():
            torch.manual_seed(7)
            return op(first, *args, **kwargs)

    def in_place(side: _Side) -> Any:
        first, args, kwargs = side.inputs(given)
        with side.active(), torch.no_grad():
            torch.manual_seed(7)
            return op.inplace_variant(first, *args, **kwargs), first

    def out(side: _Side) -> Any:
        first, args, kwargs = side.inputs(given)
        with side.active(), torch.no_grad():
            torch.manual_seed(7)
            found = op(first, *args, **kwargs)
            # Not empty ones: torch's ihfftn reads what is there before it writes.
            into = pytree.tree_map_only(torch.Tensor, torch.zeros_like, found)
            torch.manual_seed(7)
            made = op(first, *args, **kwargs, out=into)
        if not side.is_of_mesh:
            _same_twice(found, made)
        return made, into

    yield "function", plain
    if op.inplace_variant is not None and not sample.broadcasts_input:
        yield "in place", in_place
    if op.supports_out:
        yield "out=", out
    if has_gradient:
        yield "backward under activate", lambda side: _gradients(op, sample, side, is_inside=True)
        yield "backward outside", lambda side: _gradients(op, sample, side, is_inside=False)


def _same_twice(one: Any, other: Any) -> None:
    """See whether torch itself gives the same with ``out=`` as without, which not all of its functions do."""
    for here, there in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(here, there, equal_nan=True)


def _gradients(op: Any, sample: Any, side: _Side, *, is_inside: bool) -> Any:
    first, args, kwargs = side.inputs((sample.input, tuple(sample.args), dict(sample.kwargs)))
    with side.active():
        torch.manual_seed(7)
        result = sample.output_process_fn_grad(op(first, *args, **kwargs))
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not outputs:
            return None
        weights = [_weights(output) for output in outputs]
        if is_inside:
            torch.autograd.backward(outputs, weights)
    if not is_inside:
        torch.autograd.backward(outputs, weights)
    leaves = [leaf for leaf in pytree.tree_leaves((first, args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return [leaf.grad for leaf in leaves if leaf.is_leaf]


def _weights(output: torch.Tensor) -> torch.Tensor:
    """A gradient of an output that tells its elements apart."""
    with torch.no_grad():
        count = torch.arange(output.numel(), dtype=torch.float32) + 1
        return torch.cos(count).to(output.dtype).reshape(output.shape)


def _compare(finding: Finding, variant: str, run: Run, procs: ProcMesh, *, are_values_defined: bool) -> None:
    try:
        expected = run(_Side(None))
    except Exception:  # noqa: BLE001  (whatever the script's own torch does not do is not asked of a mesh)
        finding.note(variant, Verdict.SKIPPED)
        return
    try:
        found = _fetched(run(_Side(procs)), procs)
        finding.note(variant, *_difference(expected, found, are_values_defined=are_values_defined))
    except TimeoutError as error:
        finding.note(variant, Verdict.HUNG, str(error))
    except RemoteError as error:
        finding.note(variant, Verdict.OPAQUE, f"{error.operation} on a worker: {error.summary}")
    except TensorEngineError as error:
        finding.note(variant, Verdict.REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  (that is what is looked for)
        where = traceback.extract_tb(error.__traceback__)[-1]
        finding.note(
            variant,
            Verdict.OPAQUE,
            f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})",
        )


def _fetched(result: Any, procs: ProcMesh) -> Any:
    leaves, spec = pytree.tree_flatten(result)
    last = {axis: size - 1 for axis, size in procs.extent.items()}
    asked = [fetch_shard(leaf.detach(), last) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(
        [each.get(PATIENCE_S) if isinstance(leaf, Tensor) else each for leaf, each in zip(leaves, asked, strict=True)],
        spec,
    )


def _difference(expected: Any, found: Any, *, are_values_defined: bool) -> tuple[Verdict, str]:
    here, there = pytree.tree_leaves(expected), pytree.tree_leaves(found)
    if len(here) != len(there):
        return Verdict.DIFFERS, f"{len(there)} results in place of {len(here)}"
    for one, other in zip(here, there, strict=True):
        if not isinstance(one, torch.Tensor):
            if type(one) is not type(other) or (are_values_defined and one != other and one == one):
                return Verdict.DIFFERS, f"{other!r:.80} in place of {one!r:.80}"
            continue
        if not isinstance(other, torch.Tensor):
            return Verdict.DIFFERS, f"{other!r:.80} in place of a tensor"
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return Verdict.DIFFERS, f"{other.dtype}{list(other.shape)} in place of {one.dtype}{list(one.shape)}"
        if are_values_defined:
            dense = one.detach().to_dense() if one.layout is not torch.strided else one.detach()
            try:
                torch.testing.assert_close(other.detach(), dense.resolve_conj().resolve_neg(), equal_nan=True)
            except AssertionError as error:
                return Verdict.DIFFERS, " ".join(str(error).split())[:160]
    return Verdict.EQUAL, ""


def table(findings: Sequence[Finding]) -> str:
    """What became of them, as text: those that are not equal by their names."""
    lines = []
    for verdict in sorted(Verdict, reverse=True):
        those = [finding for finding in findings if finding.verdict is verdict]
        if verdict is not Verdict.EQUAL:
            lines += map(str, those)
    lines.append("")
    for verdict in Verdict:
        those = [finding for finding in findings if finding.verdict is verdict]
        listed = "" if verdict is Verdict.EQUAL else "  " + ", ".join(finding.name for finding in those)
        lines.append(f"{verdict.name.lower():8} {len(those):5}{listed}".rstrip())
    return "\n".join(lines)


def _spawn() -> ProcMesh:
    procs = this_host().spawn_procs({"gpus": 2}, env={"OMP_NUM_THREADS": "1"})
    with procs.activate():
        pass  # from now on functions of torch do on meshes what they do: the database is to find these
    return procs


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise NoAnswerError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tensor_engine.opinfo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", nargs="+", metavar="NAME", help="which (default: all)")
    parser.add_argument("--spread", type=int, metavar="N", help="only so many operations, evenly spread")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each, at most (default: %(default)s)")
    given = parser.parse_args()
    procs = _spawn()
    chosen = given.ops or (sampled(given.spread) if given.spread else list(database()))
    unknown = sorted(set(chosen) - set(database()))
    if unknown:
        parser.error(f"the database has no operation {', '.join(unknown)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    findings: list[Finding] = []
    for name in chosen:
        begin = time.monotonic()
        try:
            with _in_time(given.seconds):
                findings.append(examine(name, procs, samples=given.samples))
        except NoAnswerError:
            findings.append(Finding(name, Verdict.HUNG, {("all", Verdict.HUNG): f"not done in {given.seconds:g} s"}))
        finding = findings[-1]
        if finding.verdict > Verdict.REFUSED:
            procs = _spawn()  # whatever it has left behind is none of the next one's business
        sys.stdout.write(f"{finding.verdict.name.lower():8} {time.monotonic() - begin:6.2f} s  {name}\n")
        sys.stdout.flush()
    sys.stdout.write(table(findings) + "\n")
    tensor_engine.shutdown()
    control.shutdown()
    return int(not all(finding.is_as_documented for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
