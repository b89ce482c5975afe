"""The file of a certificate: one JSON object per line.

```
{"format": "skipper.certificate", "version": 1}
{"key": "policy", "number": 7, "root": "9f0c..."}
{"tensor": "model.norm.weight", "dtype": "bfloat16", "shape": [4096], "tiles": "q83vEjRWeJ..."}
{"tensor": "model.norm.weight", "form": "float8_e4m3fn", "dtype": "float8_e4m3fn", "shape": [4096], "tiles": "..."}
```

``tiles`` are the digests of the tensor's tiles, row by row, 32 bytes each, in base64. If a tensor is stored in 8 bits
with separate scales, its line has ``"quantized": true``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from skipper.torchstore.errors import CertificateFormatError, DTypeMismatchError
from skipper.torchstore.proofs.certified_tensor import CertifiedTensor
from skipper.torchstore.tensors.tiles import DIGEST_NBYTES, TileKey, count_tiles
from skipper.torchstore.tensors.values import dtype_named

_FORMAT = {"format": "skipper.certificate", "version": 1}
_LONGEST = 1 << 62  # of a dim: the limit of torch
_MOST_DIMS = 64  # of a tensor of torch
_SHOWN = 80


def write(key: str, number: int, root: str, tensors: Mapping[TileKey, CertifiedTensor]) -> str:
    """The text of a certificate's file."""
    lines: list[dict[str, Any]] = [_FORMAT, {"key": key, "number": number, "root": root}]
    for (name, form), tensor in sorted(tensors.items()):
        line: dict[str, Any] = {"tensor": name}
        if form:
            line["form"] = form.removeprefix("torch.")
        line |= {"dtype": tensor.dtype, "shape": list(tensor.shape)}
        if tensor.is_quantized:
            line["quantized"] = True
        lines.append(line | {"tiles": base64.b64encode(tensor.digests).decode()})
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read(data: bytes, path: str) -> tuple[str, int, str, dict[TileKey, CertifiedTensor]]:
    """The key, the number, the stated root, and the tensors of a certificate's file.

    Raises:
        CertificateFormatError: It is something else; ``path`` is for the message.
    """
    tensors: dict[TileKey, CertifiedTensor] = {}
    number = 1
    try:
        texts = data.decode().split("\n")
        if json.loads(texts[0]) != _FORMAT:
            raise ValueError(f"it does not begin with {json.dumps(_FORMAT)}")
        number = 2
        match json.loads((texts[1:2] or [""])[0] or "null"):
            case {"key": str(key), "number": int(version), "root": str(root)} if version >= 0 and version is not True:
                pass
            case _:
                raise ValueError("a key, a number and a root are expected")
        for text in filter(None, texts[2:]):
            number += 1
            at, tensor = _tensor(json.loads(text))
            if at in tensors:
                raise ValueError(f"{at[0]!r} comes twice")
            tensors[at] = tensor
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise CertificateFormatError(path, number, reason) from error
    return key, version, root, tensors


def wrong_root(path: str, stated: str, found: str) -> CertificateFormatError:
    """The error about a file whose tensors have another root than it states."""
    return CertificateFormatError(
        path, 2, f"it states the root {stated[:_SHOWN]}, but its tensors have the root {found}"
    )


def _tensor(line: Any) -> tuple[TileKey, CertifiedTensor]:
    """The tensor that one line certifies.

    Raises:
        ValueError, TypeError, LookupError: It is not a line of a certificate.
    """
    match line:
        case {"tensor": str(name), "dtype": str(dtype), "shape": [*shape], "tiles": str(tiles)}:
            pass
        case _:
            raise ValueError(f"not a line of a certificate: {str(line)[:_SHOWN]}")
    form, quantized = line.get("form", ""), line.get("quantized", False)
    if not isinstance(form, str) or not isinstance(quantized, bool):
        raise TypeError("a form is the name of a dtype, and quantized is true or false")
    for each in filter(None, (dtype, form)):
        _check_dtype(each)
    if len(shape) > _MOST_DIMS or not all(type(size) is int and 0 <= size < _LONGEST for size in shape):
        raise ValueError(f"a shape is a list of whole numbers, not {str(shape)[:_SHOWN]}")
    try:
        digests = base64.b64decode(tiles, validate=True)
    except binascii.Error as error:
        raise ValueError(f"tiles are in base64: {error}") from error
    if len(digests) != count_tiles(tuple(shape)) * DIGEST_NBYTES:
        raise ValueError(f"{name!r} of shape {shape} has {len(digests)} bytes of digests")
    at = (name, f"torch.{form}" if form else "")
    return at, CertifiedTensor(dtype, tuple(shape), digests, quantized)


def _check_dtype(name: str) -> None:
    try:
        dtype_named(f"torch.{name}")
    except DTypeMismatchError as error:
        raise ValueError(str(error)) from error
