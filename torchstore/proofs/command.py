"""``skipper weights``: verify that weights, in files or in a running store, are those of a certificate."""

from __future__ import annotations

import argparse
import asyncio
import pickle
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from skipper.commandline import CommandParser, add_command, add_job, add_timeout, run, whole
from skipper.control.api.join import join
from skipper.control.model.errors import ControlError
from skipper.control.observe.program import UNREACHABLE
from skipper.control.runtime import current_runtime

if TYPE_CHECKING:
    from skipper.torchstore.proofs.certificate import Certificate

T = TypeVar("T")

_WRONG = 1
_SHOWN = 4


def main(argv: Sequence[str], *, prog: str = "skipper weights") -> int:
    """Save a certificate, or verify weights with one. Returns the exit code.

    Args:
        argv: The arguments, without the program's name.
        prog: The command that was typed before them; shown in messages.
    """
    return run(parser(prog), argv, _do, errors=(ControlError,), status=UNREACHABLE)


def _do(given: argparse.Namespace) -> int:
    from skipper.torchstore.errors import StoreError

    try:
        found: int = given.action(given)
        return found
    except (StoreError, OSError, ValueError) as error:
        sys.stderr.write(f"{given.prog}: {error}\n")
        return _WRONG


def _save(given: argparse.Namespace) -> int:
    from skipper.torchstore.proofs.stored import certificate

    version: int | Literal["latest"] = "latest" if given.version is None else given.version
    found = _in_job(given, lambda: certificate(given.key, given.store, version=version, timeout=given.timeout))
    found.save(given.file)
    sys.stdout.write(f"version {found.version} of {found.key!r}: root {found.root}\n")
    return 0


def _verify(given: argparse.Namespace) -> int:
    from skipper.torchstore.proofs.certificate import Certificate
    from skipper.torchstore.proofs.prove import prove
    from skipper.torchstore.tensors.state_dict import flatten

    certificate = Certificate.load(given.certificate)
    held = _files(given.files) if given.files else _stored(given, certificate)
    proof = prove(held, certificate)
    missing = sorted({name for name, _ in certificate.tensors} - flatten(held)[0].keys())
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        names = ", ".join(map(repr, missing[:_SHOWN])) + more
        sys.stderr.write(f"{given.prog}: the tensors given are correct, but the certificate also has {names}\n")
        return _WRONG
    sys.stdout.write(
        f"this is version {proof.version} of {proof.key!r}: {certificate.nbytes:,} bytes, root {proof.root}\n"
    )
    return 0


def _stored(given: argparse.Namespace, certificate: Certificate) -> Mapping[Any, Any]:
    """The version of a certificate, from the store of a running job."""
    from skipper.torchstore.weights import get_state_dict

    key, version = certificate.key, certificate.version
    return _in_job(given, lambda: get_state_dict(key, store_name=given.store, version=version, timeout=given.timeout))


def _in_job(given: argparse.Namespace, ask: Callable[[], Coroutine[object, object, T]]) -> T:
    """The answer of a store, as a process of its job."""
    entered = join(given.job, name=given.prog, timeout=given.timeout)
    try:
        return asyncio.run(ask())
    finally:
        if entered:
            current_runtime.shutdown()


def _files(paths: Sequence[Path]) -> dict[str, Any]:
    """The tensors of all files together.

    Raises:
        ValueError: A file contains something else, or two files contain tensors of one name.
    """
    found: dict[str, Any] = {}
    for path in paths:
        tensors = _safetensors(path) if path.suffix == ".safetensors" else _saved(path)
        for name, tensor in tensors.items():
            if name in found:
                raise ValueError(f"{path}: {name!r} is also in another file")
            found[name] = tensor
    return found


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError(f"{path}: files of safetensors need that package: pip install safetensors") from None
    try:
        found: dict[str, Any] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def _saved(path: Path) -> dict[str, Any]:
    """The content of a file of `torch.save`, only tensors and plain values: no code in it is run."""
    import torch

    from skipper.torchstore.tensors.state_dict import flatten

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: it is not a file of tensors that torch.load reads safely: {reason}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: it holds no state dict, but a {type(content).__name__}")
    return flatten(content)[0]


def parser(prog: str) -> CommandParser:
    """The parser of the command."""
    codes = {_WRONG: "the weights differ, or could not be compared", UNREACHABLE: "the job cannot be reached"}
    own = CommandParser(prog=prog, description="Check weights against a certificate.", exit_codes=codes)
    commands = own.add_subparsers(title="commands", required=True, metavar="COMMAND")
    verify = add_command(
        commands,
        "verify",
        "compare weights with a certificate, and name the first wrong tensor and the place in it",
        exit_codes=codes,
    )
    verify.add_argument(
        "certificate",
        type=Path,
        metavar="CERTIFICATE",
        help="file written by Certificate.save or by skipper weights certificate",
    )
    verify.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="safetensors or torch.save files that together hold the state dict (default: read it from the store of a "
        "job)",
    )
    verify.set_defaults(action=_verify)
    save = add_command(commands, "certificate", "save the certificate of a version in a store", exit_codes=codes)
    save.add_argument("key", metavar="KEY", help="key of the state dict")
    save.add_argument("file", type=Path, metavar="FILE", help="file to write")
    save.add_argument("--version", type=whole(0), default=None, metavar="N", help="the version (default: the newest)")
    save.set_defaults(action=_save)
    for command in (verify, save):
        command.set_defaults(prog=prog)
        command.add_argument("--store", default="default", metavar="NAME", help="name of the store (default: default)")
        add_job(command)
        add_timeout(command, 60.0, "seconds to wait for each answer, and for the read of a version")
    return own
