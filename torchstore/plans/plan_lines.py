"""The file of a plan: one JSON object per line, for people and for ``diff``.

```
{"format": "skipper.load_plan", "version": 1}
{"parameter": "qkv_proj.weight", "dtype": "bfloat16", "shape": [96, 64]}
{"checkpoint": "q_proj.weight", "dtype": "bfloat16", "shape": [128, 64]}
{"copy": "q_proj.weight", "from": "[64:128, 0:64]", "into": "qkv_proj.weight", "at": "[0:64, 0:64]"}
{"fill": "embed.weight", "at": "[500:512, 0:64]", "value": 0.0}
{"whole": ["scale"], "reason": "aten.mul.Tensor"}
{"skipped": "rotary.inv_freq"}
```

A copy may have ``casts``, and ``axes``: for each dim of the parameter's box that is longer than 1 the dim of the
checkpoint tensor that it comes from. If one of the two sides is not a box, both have an offset and strides instead, in
elements, and the copy has a ``shape``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from skipper.torchstore.algebra.layout import Ints
from skipper.torchstore.algebra.strided import Strided
from skipper.torchstore.errors import LoadPlanFormatError
from skipper.torchstore.plans.regions import (
    MOST_BLOCKS,
    RecordedTensor,
    RegionCopy,
    RegionFill,
    WholeTensors,
    dtype_of,
    is_scattered,
)

_FORMAT = {"format": "skipper.load_plan", "version": 1}
_LONGEST = 1 << 62  # of a dim, an offset or a stride: the limit of torch


class PlanParts(NamedTuple):
    """The fields of a `LoadPlan`."""

    parameters: Mapping[str, RecordedTensor]
    checkpoint: Mapping[str, RecordedTensor]
    copies: tuple[RegionCopy, ...]
    fills: tuple[RegionFill, ...]
    whole: tuple[WholeTensors, ...]
    skipped: tuple[str, ...]


def write(parts: PlanParts) -> str:
    """The text of a plan's file; equal plans have equal texts."""
    lines: list[dict[str, Any]] = [_FORMAT]
    lines += [_tensor_line("parameter", name, tensor) for name, tensor in parts.parameters.items()]
    lines += [_tensor_line("checkpoint", name, tensor) for name, tensor in parts.checkpoint.items()]
    lines += [_copy_line(copy, parts) for copy in parts.copies]
    lines += [_fill_line(fill, parts) for fill in parts.fills]
    lines += [{"whole": list(group.names), "reason": group.reason} for group in parts.whole]
    lines += [{"skipped": name} for name in parts.skipped]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read(data: bytes, path: str) -> PlanParts:
    """The inverse of `write`.

    Raises:
        LoadPlanFormatError: It is something else; ``path`` is for the message.
    """
    reader, number = _Reader(), 1
    try:
        texts = data.decode().splitlines()
        if not texts or json.loads(texts[0]) != _FORMAT:
            raise ValueError(f"it does not begin with {json.dumps(_FORMAT)}")
        for text in texts[1:]:
            number += 1
            reader.take(json.loads(text))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise LoadPlanFormatError(path, number, reason) from error
    return PlanParts(
        reader.parameters,
        reader.checkpoint,
        tuple(reader.copies),
        tuple(reader.fills),
        tuple(reader.whole),
        tuple(reader.skipped),
    )


class _Reader:
    def __init__(self) -> None:
        self.parameters: dict[str, RecordedTensor] = {}
        self.checkpoint: dict[str, RecordedTensor] = {}
        self.copies: list[RegionCopy] = []
        self.fills: list[RegionFill] = []
        self.whole: list[WholeTensors] = []
        self.skipped: list[str] = []

    def take(self, line: Any) -> None:
        """Add one line.

        Raises:
            ValueError, TypeError, LookupError: It is not a line of a plan.
        """
        match line:
            case {"parameter": str(name)} if name not in self.parameters:
                self.parameters[name] = _read_tensor(line)
            case {"checkpoint": str(name)} if name not in self.checkpoint and "strides" not in line:
                self.checkpoint[name] = _read_tensor(line)
            case {"copy": str(name), "into": str(parameter)}:
                self.copies.append(self._read_copy(line, name, parameter))
            case {"fill": str(parameter), "at": at, "value": int() | float() as value}:
                into = _read_region(at, line, self.parameters[parameter])
                self.fills.append(RegionFill(parameter, into, value))
            case {"whole": [str(), *_] as names, "reason": str(reason)}:
                known = {name: self.checkpoint[name] for name in names}
                self.whole.append(WholeTensors(tuple(known), reason))
            case {"skipped": str(name)}:
                self.skipped.append(name)
            case _:
                raise ValueError(f"not a line of a plan: {str(line)[:80]}")

    def _read_copy(self, line: dict[str, Any], name: str, parameter: str) -> RegionCopy:
        source_of, into_of = self.checkpoint[name], self.parameters[parameter]
        source, into = _read_region(line["from"], line, source_of), _read_region(line["at"], line, into_of)
        if isinstance(line["from"], str) and "axes" in line:
            source = _in_order(source, source_of, _ints(line["axes"]))
        if source.shape != into.shape:
            raise ValueError(f"the source of the copy has the shape {source.shape}, its destination {into.shape}")
        casts = line.get("casts", [])
        if not isinstance(casts, list) or not all(isinstance(cast, str) for cast in casts):
            raise TypeError(f"casts are a list of names of dtypes, not {casts!r}")
        dtypes = tuple(str(dtype_of(cast)) for cast in casts)
        if (dtypes or (source_of.dtype,))[-1] != into_of.dtype:
            raise ValueError(f"{source_of.dtype} is copied into {into_of.dtype}, without a cast between their dtypes")
        source, into = _sorted(source, into)
        copy = RegionCopy(parameter, into, name, source, dtypes)
        if is_scattered(copy, source_of.shape):
            raise ValueError(f"the copy reads more than {MOST_BLOCKS} blocks")
        return copy


def _tensor_line(kind: str, name: str, tensor: RecordedTensor) -> dict[str, Any]:
    line = {kind: name, "dtype": tensor.dtype.removeprefix("torch."), "shape": list(tensor.shape)}
    plain = RecordedTensor.of(tensor.shape, tensor.dtype) == tensor
    return line if plain else line | {"strides": list(tensor.strides)}


def _read_tensor(line: dict[str, Any]) -> RecordedTensor:
    shape, strides = _ints(line["shape"]), _ints(line["strides"]) if "strides" in line else None
    if strides is not None and (len(strides) != len(shape) or not all(strides)):
        raise ValueError("a tensor has one stride above 0 for each dim")
    if not isinstance(line["dtype"], str):
        raise TypeError(f"a dtype is a name, not {line['dtype']!r}")
    return RecordedTensor.of(shape, dtype_of(line["dtype"]), strides)


def _copy_line(copy: RegionCopy, parts: PlanParts) -> dict[str, Any]:
    source = _as_box(copy.source, parts.checkpoint[copy.checkpoint])
    into = _as_box(copy.into, parts.parameters[copy.parameter])
    line: dict[str, Any] = {"copy": copy.checkpoint}
    if source is None or into is None:
        line |= {"from": _as_strides(copy.source), "into": copy.parameter, "at": _as_strides(copy.into)}
        line["shape"] = list(copy.source.shape)
    else:
        line |= {"from": source[0], "into": copy.parameter, "at": into[0]}
        axes = [axis for _, axis in sorted(zip(into[1], source[1], strict=True))]
        if axes != sorted(axes):
            line["axes"] = axes
    return line | ({"casts": [cast.removeprefix("torch.") for cast in copy.casts]} if copy.casts else {})


def _fill_line(fill: RegionFill, parts: PlanParts) -> dict[str, Any]:
    box = _as_box(fill.into, parts.parameters[fill.parameter])
    line: dict[str, Any] = {"fill": fill.parameter}
    line |= {"at": box[0]} if box else {"at": _as_strides(fill.into), "shape": list(fill.into.shape)}
    return line | {"value": fill.value}


def _as_strides(region: Strided) -> dict[str, Any]:
    return {"offset": region.offset, "strides": list(region.strides)}


def _as_box(region: Strided, tensor: RecordedTensor) -> tuple[str, list[int]] | None:
    """A region as slices of the tensor, and the tensor's dims that belong to the region's; None: it is not a box."""
    long = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    dim_of = {tensor.strides[dim]: dim for dim in long}
    if len(dim_of) != len(long) or any(stride not in dim_of for stride in region.strides):
        return None
    dims = [dim_of[stride] for stride in region.strides]
    starts, left = [0] * len(tensor.shape), region.offset
    for dim in sorted(long, key=lambda dim: -tensor.strides[dim]):
        starts[dim], left = divmod(left, tensor.strides[dim])
    stops = [start + 1 for start in starts]
    for dim, size in zip(dims, region.shape, strict=True):
        stops[dim] = starts[dim] + size
    if left or any(stop > size for stop, size in zip(stops, tensor.shape, strict=True)):
        return None
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(starts, stops, strict=True)) + "]", dims


def _read_region(words: Any, line: dict[str, Any], tensor: RecordedTensor) -> Strided:
    """A region, with the tensor's dims in which it is longer than 1, in order.

    Raises:
        ValueError, TypeError, LookupError: It is not a region, or reaches out of the tensor.
    """
    if isinstance(words, str):
        if not re.fullmatch(r"\[(\d{1,18}:\d{1,18}(, \d{1,18}:\d{1,18})*)?\]", words, re.ASCII):
            raise ValueError(f"not a box: {words[:80]}")
        ends = [tuple(map(int, part.split(":"))) for part in words[1:-1].split(", ") if part]
        if len(ends) != len(tensor.shape):
            raise ValueError(f"{words} has another number of dims than {tensor}")
        if not all(start < stop <= size for (start, stop), size in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"{words} is empty, or reaches out of {tensor}")
        long = [dim for dim, (start, stop) in enumerate(ends) if stop - start > 1]
        offset = sum(start * stride for (start, _), stride in zip(ends, tensor.strides, strict=True))
        return Strided(
            offset, tuple(ends[dim][1] - ends[dim][0] for dim in long), tuple(tensor.strides[dim] for dim in long)
        )
    (offset,), strides, shape = _ints([words["offset"]]), _ints(words["strides"]), _ints(line["shape"])
    region = Strided(offset, shape, strides)
    if len(shape) != len(strides) or not all(shape) or not tensor.all.numel or region.last > tensor.all.last:
        raise ValueError(f"a region reaches out of {tensor}, or has no elements")
    if not all(strides) or len(set(strides)) != len(strides):
        raise ValueError(f"a region has several of its elements in one place: strides {strides}")
    return region


def _in_order(source: Strided, tensor: RecordedTensor, axes: Ints) -> Strided:
    """A box with its long dims in the order of ``axes``."""
    place = {stride: number for number, stride in enumerate(source.strides)}
    order = [place[tensor.strides[axis]] for axis in axes]
    if sorted(order) != list(range(len(source.shape))):
        raise ValueError(f"axes {axes} do not name each long dim of the box once")
    return Strided(source.offset, tuple(source.shape[at] for at in order), tuple(source.strides[at] for at in order))


def _sorted(source: Strided, into: Strided) -> tuple[Strided, Strided]:
    """Both with the largest strides of the parameter first, as they are recorded."""
    order = sorted(range(len(into.shape)), key=lambda dim: (-into.strides[dim], -source.strides[dim]))
    first, second = (
        Strided(each.offset, tuple(each.shape[dim] for dim in order), tuple(each.strides[dim] for dim in order))
        for each in (source, into)
    )
    return first, second


def _ints(numbers: Any) -> Ints:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < _LONGEST for number in numbers):
        raise TypeError(f"a list of whole numbers is expected, not {str(numbers)[:80]}")
    return tuple(numbers)
