"""What a store's processes tell each other, as targets call it."""

import contextlib
import json
import pickle
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from skipper import dataplane
from skipper.benchmarks.weight_sync import given_model
from skipper.dataplane import RDMABuffer
from skipper.torchstore.algebra.layout import Box, Piece
from skipper.torchstore.algebra.manifest import BlockScaled, Manifest, MeshPosition, TensorItem
from skipper.torchstore.errors import CertificateFormatError
from skipper.torchstore.mirror.manifest import LatestVersion, MirroredTensor, MirrorManifest
from skipper.torchstore.mirror.signatures import SharedSecret, seal, unseal
from skipper.torchstore.peers import shm_value_board as board
from skipper.torchstore.plans import plan_lines
from skipper.torchstore.proofs import certificate_lines
from skipper.torchstore.proofs.certificate import Certificate
from skipper.torchstore.proofs.certified_tensor import CertifiedTensor
from skipper.torchstore.tensors import delta
from skipper.torchstore.tensors.values import inline_tensor, open_inline
from tests.fuzz.mutation import numbers_of, parts_in_json
from tests.fuzz.verdicts import Broken


@cache
def _page() -> tuple[memoryview, RDMABuffer]:
    memory = dataplane.empty_array(board.PAGE_NBYTES, np.uint8)
    return memory.data, RDMABuffer(memory)


def read_board(data: bytes) -> None:
    """An answer of the controller, and a page of its board that somebody has written over."""
    memory, buffer = _page()
    nbytes = board._ANSWER.size
    _, place, _ = board.open_answer(data[:nbytes])
    page = data[nbytes:][: board.PAGE_NBYTES]
    memory[: len(page)] = page
    if place is not None:
        reader = board.BoardReader()
        reader.learn("key", place)
        reader.add_page(place.page, buffer)
        reader.look("key")


def board_seeds() -> Iterator[bytes]:
    """A value that is posted at the beginning of a page, and one that is not."""
    place = board.BoardPlace(0, 0, 128, 7)
    head = board._HEAD.pack(place.serial, 3, 5)
    record = board._digest(head, b"value") + head + b"value"
    yield board.pack_answer(3, place, b"") + record
    yield board.pack_answer(3, None, b"")


def read_load_plan(data: bytes) -> None:
    """A plan's file: whatever is taken of it stays within the tensors that it tells of, and is written again alike."""
    parts = plan_lines.read(data, "plan.jsonl")
    for copy in parts.copies:
        block = next(copy.blocks(parts.checkpoint[copy.checkpoint].shape))
        if not 0 <= block.into.offset <= block.into.last <= parts.parameters[copy.parameter].all.last:
            raise Broken(f"{copy} reaches out of its parameter")
    again = plan_lines.write(parts)
    if plan_lines.write(plan_lines.read(again.encode(), "plan.jsonl")) != again:
        raise Broken("the plan changes when it is written and read")


def list_model(data: bytes) -> None:
    """A model's names and shapes, as ``skipper weight-sync --model`` takes them."""
    given_model.read_document(data, "model.json")


def list_model_seeds() -> Iterator[bytes]:
    """Shapes alone, and as the header of safetensors has them."""
    yield json.dumps({"w": [4, 2], "scale": []}).encode()
    yield json.dumps({"w": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}, "__metadata__": {}}).encode()


def load_plan_seeds() -> Iterator[bytes]:
    """A plan with a line of each kind."""
    lines = [
        {"format": "skipper.load_plan", "version": 1},
        {"parameter": "w", "dtype": "float32", "shape": [8, 6]},
        {"parameter": "v", "dtype": "float32", "shape": [4, 6], "strides": [1, 4]},
        {"checkpoint": "a", "dtype": "bfloat16", "shape": [4, 6]},
        {"copy": "a", "from": "[0:4, 0:6]", "into": "w", "at": "[0:6, 0:4]", "axes": [1, 0], "casts": ["float32"]},
        {
            "copy": "a",
            "from": {"offset": 0, "strides": [6, 12, 1]},
            "into": "w",
            "at": {"offset": 0, "strides": [12, 6, 1]},
            "shape": [2, 2, 6],
            "casts": ["float32"],
        },
        {"fill": "v", "at": "[0:4, 2:3]", "value": 0.5},
        {"whole": ["a"], "reason": "aten.mul.Tensor"},
        {"skipped": "b"},
    ]
    yield "".join(json.dumps(line) + "\n" for line in lines).encode()


def read_certificate(data: bytes) -> None:
    """A certificate's file: what is taken of it is as large as it says, and is written again alike."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 1:  # with the root that its tensors make, or nothing but roots would be looked at
        with contextlib.suppress(CertificateFormatError):
            key, number, _, tensors = certificate_lines.read(data, "certificate")
            root = Certificate(key, number, tensors).root
            data = certificate_lines.write(key, number, root, tensors).encode()
    certificate = Certificate.decode(data, "certificate")
    for tensor in certificate.tensors.values():
        tensor.table()
    again = certificate_lines.write(certificate.key, certificate.version, certificate.root, certificate.tensors)
    if Certificate.decode(again.encode(), "certificate") != certificate:
        raise Broken("the certificate changes when it is written and read")


def _certificate() -> Certificate:
    tensors = {
        ("norm", ""): CertifiedTensor("bfloat16", (3,), bytes(32)),
        ("w", ""): CertifiedTensor("float8_e4m3fn", (40, 300), bytes(range(192)), is_quantized=True),
        ("w", "torch.bfloat16"): CertifiedTensor("bfloat16", (40, 300), bytes(192), is_quantized=True),
    }
    return Certificate("policy", 7, tensors)


def certificate_seeds() -> Iterator[bytes]:
    """One of two tensors, of which one is quantized."""
    made = _certificate()
    yield certificate_lines.write(made.key, made.version, made.root, made.tensors).encode()


def read_tag(data: bytes) -> None:
    """A tag that came with samples: none but those of this version are taken."""
    try:
        tag = json.loads(data)
    except (ValueError, RecursionError):
        return
    made = _certificate()
    if made.accepts(tag) and tag["root"] != made.root:
        raise Broken("a tag of another root is taken")


def tag_seeds() -> Iterator[bytes]:
    """A right one."""
    made = _certificate()
    tag = {"key": made.key, "version": made.version, "root": made.root, "proved": "00", "covered": 0.5}
    yield json.dumps(tag).encode()


def read_manifest(data: bytes) -> None:
    """A manifest of a process of the job; its parts are as odd as JSON can have them."""
    kind, place, plain, objects, paths, sums = parts_in_json(data, 6)
    encoded = pickle.dumps((kind, place, plain, objects, paths, sums), protocol=5)
    manifest = Manifest.decode(encoded)
    for name, item in manifest.tensors.items():
        manifest.boxes(name)
        item.block_at((0,) * len(item.strides), item.global_shape)
        item.piece_at((0,) * len(item.global_shape))
    manifest.part.shard()


def manifest_seeds() -> Iterator[bytes]:
    """One of two tensors."""
    pieces = (Piece(Box((0, 0), (2, 4)), (0, 0)),)
    items = {
        "weight": TensorItem("torch.float32", (4, 4), pieces, 0, 0, (16, 4), 4),
        "bias": TensorItem("torch.float8_e4m3fn", (4, 4), pieces, 0, 64, (4, 1), 1, scales="weight", block=(2, 2)),
    }
    manifest = Manifest.of(
        "state_dict", MeshPosition((0,), (2,), (0,)), items, ("step",), {"weight": ("weight",)}, (0, 8)
    )
    yield json.dumps(pickle.loads(manifest.encoded)).encode()


def read_inline(data: bytes) -> None:
    """A small tensor as it travels: its bytes, its dtype and its shape."""
    dtype, shape, text = parts_in_json(data, 3)
    open_inline(pickle.dumps((text.encode(), dtype, shape), protocol=5)).tensor()


def inline_seeds() -> Iterator[bytes]:
    """Tensors of two dtypes."""
    for tensor in (torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(0, 5)):
        content, dtype, shape = pickle.loads(inline_tensor(tensor))
        yield json.dumps([dtype, shape, content.decode("latin-1")]).encode()


def read_flags(data: bytes) -> None:
    """Which cells a version has changed, of so many."""
    (count,), packed = numbers_of(data, 1 << 16)
    if (flags := delta.unpack_flags(packed, count)).shape != (count,):
        raise Broken(f"{flags.shape} flags in place of {count}")


def flags_seeds() -> Iterator[bytes]:
    """Few and many."""
    for count in (0, 9, 1000):
        flags = torch.zeros(count, dtype=torch.bool)
        flags[::7] = True
        yield count.to_bytes(2, "little") + delta.pack_flags(flags)


def note_seeds() -> Iterator[bytes]:
    """Where rank 0 is: by a file, and by a gate."""
    yield b'{"run": "spmd-0123456789abcdef01234567", "path": "/run/user/1000/skipper/spmd-0.json"}'
    yield b'{"run": "spmd-0123456789abcdef01234567", "gate": "10.0.0.1:29400"}'


_MIRROR_SECRET = SharedSecret(bytes(32))


def read_seal(data: bytes) -> None:
    """A file of a mirror that whoever can write there has put: nobody but who has the secret gets a body past it."""
    body = unseal(_MIRROR_SECRET, "version", data, "file")
    if not data.endswith(body) or seal(_MIRROR_SECRET, "version", body) != data:
        raise Broken("a body that was not signed so")


def seal_seeds() -> Iterator[bytes]:
    """A signed file."""
    yield seal(_MIRROR_SECRET, "version", b"{}")


def read_mirror(data: bytes) -> None:
    """A signed manifest: its chunks lie within their tensors, and it is written again alike."""
    manifest = MirrorManifest.decode(data, "file")
    for tensor in manifest.tensors.values():
        digest, box = next(tensor.chunks(), ("", Box.whole(tensor.shape)))
        if box.numel and (not digest or box.intersect(Box.whole(tensor.shape)) != box):
            raise Broken(f"{box} reaches out of its tensor")
    if MirrorManifest.decode(manifest.encode(), "file").digests() != manifest.digests():
        raise Broken("another manifest was written")


def mirror_seeds() -> Iterator[bytes]:
    """A version with a quantized tensor, a scalar, an empty tensor and other entries."""
    digests = tuple(f"{number:064x}" for number in range(4))
    scaled = BlockScaled("MXFP8", (1, 32), 1, "w_scale", "")
    tensors = {
        "w": MirroredTensor("torch.float8_e4m3fn", (64, 64), (32, 32), digests, scaled),
        "w_scale": MirroredTensor("torch.uint8", (64, 2), (64, 2), digests[:1]),
        "s": MirroredTensor("torch.float32", (), (), digests[:1]),
        "e": MirroredTensor("torch.bfloat16", (0, 3), (1, 3), ()),
    }
    paths = {**{name: (name,) for name in tensors}, "n": ("n",)}
    yield MirrorManifest("policy", 7, tensors, {"n": [1, {"a": None}]}, paths).encode()


def read_mirror_latest(data: bytes) -> None:
    """What says which version is the newest."""
    LatestVersion.decode(data, "policy", "file")


def mirror_latest_seeds() -> Iterator[bytes]:
    """One of them."""
    yield LatestVersion(7, 5).encode("policy")
