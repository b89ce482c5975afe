"""The result of a proof in one process, and how the proofs of several processes are joined."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipper.torchstore.algebra.layout import Box, Ints
from skipper.torchstore.errors import ProofError
from skipper.torchstore.proofs.certificate import Certificate, describe_box
from skipper.torchstore.tensors.tiles import TileBlock, TileFragment, TileKey, TileTable, count_elements
from skipper.torchstore.tensors.values import dtype_named

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class WrongTile:
    """Elements that differ from the certificate.

    Attributes:
        name: The name of the tensor in the certificate; for padding, that of the parameter.
        parameter: The parameter that holds them; without a plan, the same name.
        box: The box in the whole tensor; for padding, the first wrong element in the parameter.
    """

    name: str
    parameter: str
    box: Box

    def __str__(self) -> str:
        within = f" in {self.parameter!r}" if self.parameter not in ("", self.name) else ""
        return f"{self.name}{describe_box(self.box.offsets, self.box.shape)}{within}"


@dataclass(frozen=True)
class Proof:
    """The part of a certified version that one process, or several together, hold.

    The example of `Certificate` shows one.

    Attributes:
        key: The key of the version.
        version: Its number.
        root: The root of its certificate.
        covered: The part of the version's bytes that was proved to be here, between 0 and 1: for one rank the part of
            its shards, for all ranks together 1.
        wrong: Tensors whose bytes here differ from the certificate.
        unproved: Why tensors cannot be compared with the certificate, by the names of parameters, or by the names of
            the checkpoint if the plan has only those.
        shown: Which tiles were proved, eight per byte.
        open: Parts of tiles that the edges of shards cut: `join_proofs` joins them with those of the adjacent ranks.
    """

    key: str
    version: int
    root: str
    covered: float
    wrong: tuple[WrongTile, ...]
    unproved: Mapping[str, str]
    shown: Mapping[TileKey, bytes]
    open: Mapping[TileKey, tuple[TileFragment, ...]]

    @property
    def is_right(self) -> bool:
        """Whether nothing here differs from the certificate."""
        return not self.wrong

    @property
    def is_whole(self) -> bool:
        """Whether everything here was compared: no parts need to be joined, and everything could be proved."""
        return not self.open and not self.unproved

    @property
    def proved(self) -> str:
        """A hash of the root and of what was proved, in hexadecimal digits."""
        found = hashlib.sha256(f"skipper proof\0{self.root}".encode())
        for (name, form), bits in sorted(self.shown.items()):
            found.update(f"{name}\0{form}\0{len(bits)}\0".encode() + bits)
        return found.hexdigest()

    def tag(self) -> dict[str, Any]:
        """A tag of strings and numbers for what is made with these weights: `Certificate.accepts` checks it.

        Raises:
            ProofError: Something is wrong here, or nothing of the version was proved.
        """
        if self.wrong or not self.covered:
            raise ProofError(_problem(self) or f"nothing of version {self.version} of {self.key!r} was compared", self)
        return {
            "key": self.key,
            "version": self.version,
            "root": self.root,
            "proved": self.proved,
            "covered": self.covered,
        }

    def check(self, *, strict: bool) -> None:
        """Check that nothing is wrong, and with ``strict`` that something was compared, and that everything could be.

        Raises:
            ProofError: A check failed.
        """
        problem = _problem(self)
        if not problem and strict and self.unproved:
            (name, why), *others = self.unproved.items()
            more = f", and {len(others)} more" if others else ""
            problem = (
                f"{name!r} cannot be proved to be of version {self.version} of {self.key!r}: {why}{more} "
                "(strict=False skips these)"
            )
        if not problem and strict and not self.shown:
            problem = (
                f"no tensor given here is certified for version {self.version} of {self.key!r} "
                "(strict=False allows that)"
            )
        if problem:
            first = self.wrong[0] if self.wrong else WrongTile("", "", Box((), ()))
            box = (first.box.offsets, first.box.shape) if self.wrong else None
            raise ProofError(problem, self, first.name, first.parameter, box)


def join_proofs(certificate: Certificate, proofs: Iterable[Proof]) -> Proof:
    """The proof of what the ranks of an engine hold together, including tiles that the edges of their shards cut.

    Args:
        certificate: The certificate with which all of the proofs were made.
        proofs: The proofs of the ranks, in any order.

    Raises:
        ProofError: Something is wrong.
        ValueError: A proof is of another version.
    """
    comparison = TileComparison(certificate)
    for proof in proofs:
        if (proof.key, proof.version, proof.root) != (certificate.key, certificate.version, certificate.root):
            raise ValueError(
                f"a proof of version {proof.version} of {proof.key!r} ({proof.root[:12]}) does not belong to the "
                f"certificate of version {certificate.version} of {certificate.key!r} ({certificate.root[:12]})"
            )
        comparison.take(proof)
    joined = comparison.report()
    joined.check(strict=False)
    return joined


class TileComparison:
    """Compares elements with a certificate, piece by piece.

    Attributes:
        certificate: The certificate.
        wrong: The boxes that were found to differ.
        unproved: See `Proof`.
    """

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.wrong: list[WrongTile] = []
        self.unproved: dict[str, str] = {}
        self._tables: dict[TileKey, TileTable] = {}
        self._parameters: dict[TileKey, str] = {}

    def show(self, at: TileKey, parameter: str, blocks: Sequence[TileBlock], fragments: Sequence[TileFragment]) -> None:
        """Compare the elements of a parameter with those of a certified tensor."""
        self._parameters[at] = parameter
        self.refuse(at, parameter, self._table(at).show(blocks, fragments))

    def refuse(self, at: TileKey, parameter: str, boxes: Iterable[Box]) -> None:
        """Record boxes that differ."""
        self.wrong += [WrongTile(at[0], parameter, box) for box in boxes]

    def take(self, proof: Proof) -> None:
        """Add the proof of another process."""
        self.wrong += proof.wrong
        self.unproved.update(proof.unproved)
        for at, bits in proof.shown.items():
            self._table(at).mark(bits)
        for at, fragments in proof.open.items():
            self._table(at).show((), fragments)

    def report(self) -> Proof:
        """Join the fragments that can be joined, and make the proof."""
        for at, table in self._tables.items():
            self.refuse(at, self._parameters.get(at, at[0]), table.join())
        found = {at: table.fragments() for at, table in self._tables.items()}
        return Proof(
            self.certificate.key,
            self.certificate.version,
            self.certificate.root,
            self._covered(),
            tuple(dict.fromkeys(self.wrong)),
            dict(self.unproved),
            {at: table.bits for at, table in self._tables.items()},
            {at: fragments for at, fragments in found.items() if fragments},
        )

    def _table(self, at: TileKey) -> TileTable:
        if at not in self._tables:
            self._tables[at] = self.certificate.tensors[at].table()
        return self._tables[at]

    def _covered(self) -> float:
        """The part of the stored bytes that was proved, in any form."""
        total = self.certificate.nbytes
        if not total:
            return 1.0
        shown = 0.0
        for name in {name for name, _ in self._tables}:
            stored = self.certificate.tensors[name, ""]
            by_shape: dict[
                Ints, list[NDArray[np.bool_]]
            ] = {}  # tiles of values may differ in number from those of packed elements
            for at, table in self._tables.items():
                if at[0] == name:
                    by_shape.setdefault(table.shape, []).append(table.shown)
            part = max(
                count_elements(shape, np.logical_or.reduce(tiles)) / max(prod(shape), 1)
                for shape, tiles in by_shape.items()
            )
            shown += part * prod(stored.shape) * dtype_named(stored.dtype).itemsize
        return shown / total


def _problem(proof: Proof) -> str:
    """The problem, as text; empty if nothing is wrong."""
    if not proof.wrong:
        return ""
    places = ", ".join(map(str, proof.wrong[:_SHOWN]))
    more = f", and {len(proof.wrong) - _SHOWN} more" if len(proof.wrong) > _SHOWN else ""
    return f"this is not version {proof.version} of {proof.key!r}: {places}{more} differ from its certificate"
