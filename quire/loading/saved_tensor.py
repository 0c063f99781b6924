"""One tensor in the bytes that torch.save writes, sent by a stranger. Nothing is unpickled.

The archive's pickle is read as a list of instructions: the few that describe a dense tensor are followed over numbers
and names, and any other refuses the bytes. `torch.load(weights_only=True)` runs no code either, but it trusts sizes: a
storage that claims more bytes than the archive has, a shape beyond the storage, and sparse indices are not checked.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from typing import Any, NamedTuple

import numpy as np

from quire.errors import ValidationError, short_repr

MAX_DESCRIPTION_BYTES = 4096
"""Of the pickle: that of one tensor has about 160."""
MAX_ENTRIES = 64
"""Files in the archive: that of one tensor has 7."""
OVERHEAD_BYTES = 1 << 16
"""What an archive has besides the numbers, at most."""
_ENTRY = b"PK\x01\x02"
_DTYPES = {"torch FloatStorage": "<f4", "torch HalfStorage": "<f2", "torch BFloat16Storage": "<u2"}
_DENSE = "torch._utils _rebuild_tensor_v2"


class _Name(NamedTuple):
    """A class or a function that the pickle names; never looked up."""

    name: str


class _Stored(NamedTuple):
    """A storage that the pickle names."""

    fields: Any


class _Called(NamedTuple):
    """A call that the pickle asks for; never made."""

    function: Any
    arguments: Any


_MARK = object()


def read_tensor(data: bytes, field: str, max_rows: int, width: int) -> np.ndarray:
    """The tensor [at most `max_rows`, `width`] as float32. `field`: named in errors, which are `ValidationError`."""
    try:
        with _open(data, field) as archive:
            described = _described(_read(archive, "data.pkl", MAX_DESCRIPTION_BYTES, field), field)
            return _values(archive, described, field, max_rows, width)
    except ValidationError:
        raise
    except Exception as error:  # a damaged archive raises whatever its bytes lead to
        raise _refused(field, f"are damaged ({type(error).__name__})") from None


def _open(data: bytes, field: str) -> zipfile.ZipFile:
    if data.count(_ENTRY) > MAX_ENTRIES:  # counted before each of them becomes an object
        raise _refused(field, f"have more than {MAX_ENTRIES} files in their archive")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except zipfile.BadZipFile:
        raise _refused(field, "are no archive of torch.save (torch 1.6 or newer)") from None
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
        raise _refused(field, "are a compressed archive, which torch.save does not write")
    return archive


def _read(archive: zipfile.ZipFile, name: str, most: int, field: str) -> bytes:
    """A file of the archive, whatever the folder in it is called."""
    found = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == name]
    if len(found) != 1:
        raise _refused(field, f"have {len(found)} files {short_repr(name)} in their archive")
    if found[0].file_size > most:
        raise _refused(field, f"have {found[0].file_size} bytes in {name}; at most {most} are read")
    with archive.open(found[0]) as file:
        return file.read(most + 1)


def _described(pickled: bytes, field: str) -> tuple[Any, ...]:
    """The arguments of the one call that makes a dense tensor."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("PROTO", "STOP"):
            continue
        if name == "GLOBAL":
            if argument not in (_DENSE, "collections OrderedDict") and argument not in _DTYPES:
                raise _refused(field, f"have {short_repr(argument)} in them: {_meaning(str(argument))}")
            stack.append(_Name(str(argument)))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])
        elif name in ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif name in ("NEWTRUE", "NEWFALSE"):
            stack.append(name == "NEWTRUE")
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            start = len(stack) - 1 - stack[::-1].index(_MARK)
            stack[start:] = [tuple(stack[start + 1 :])]
        elif name == "BINPERSID":
            stack.append(_Stored(stack.pop()))
        elif name == "REDUCE":
            stack[-2:] = [_Called(*stack[-2:])]
        else:
            raise _refused(field, f"have the pickle instruction {name} in them: send one dense tensor alone")
    made = stack[0] if len(stack) == 1 else None
    if not isinstance(made, _Called) or made.function != _Name(_DENSE) or not isinstance(made.arguments, tuple):
        raise _refused(field, "hold something other than one dense tensor")
    return made.arguments


def _meaning(name: str) -> str:
    if "sparse" in name:
        return "a sparse tensor, which is not read: send it dense"
    if name.startswith("torch ") and name.endswith("Storage"):
        return "a tensor of another type: send float32, float16 or bfloat16"
    return "only one dense tensor of floating-point numbers is read, and nothing is unpickled"


def _values(archive: zipfile.ZipFile, described: tuple[Any, ...], field: str, max_rows: int, width: int) -> np.ndarray:
    stored, offset, shape, strides = described[:4]
    _, (kind,), key, _, count = stored.fields  # what is shaped otherwise raises, and is damaged
    if not (_are_sizes(shape) and _are_sizes(strides) and _are_sizes((offset, count)) and len(shape) == len(strides)):
        raise _refused(field, "have sizes that are no counts")
    if len(shape) == 3 and shape[0] == 1:  # a batch of one
        shape, strides = shape[1:], strides[1:]
    if len(shape) != 2 or shape[1] != width or not 0 < shape[0] <= max_rows:
        raise _refused(
            field, f"have the shape {short_repr(list(shape))}; [tokens, {width}] is needed, at most {max_rows} tokens"
        )
    item = np.dtype(_DTYPES[kind])
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= count:
        raise _refused(field, f"claim the values {list(shape)} of a storage that has {count}")
    order = [entry for entry in archive.infolist() if entry.filename.partition("/")[2] == "byteorder"]
    if order and _read(archive, "byteorder", 16, field) != b"little":
        raise _refused(field, "were saved on a big-endian machine")
    raw = _read(archive, f"data/{key}", max_rows * width * 4 + OVERHEAD_BYTES, field)
    if len(raw) != count * item.itemsize:
        raise _refused(field, f"claim a storage of {count * item.itemsize} bytes; the archive has {len(raw)}")
    values = np.lib.stride_tricks.as_strided(
        np.frombuffer(raw, item)[offset:], shape, [stride * item.itemsize for stride in strides], writeable=False
    )
    if kind == "torch BFloat16Storage":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _are_sizes(given: Any) -> bool:
    return isinstance(given, tuple) and all(type(size) is int and 0 <= size < 1 << 40 for size in given)


def _refused(field: str, why: str) -> ValidationError:
    return ValidationError(f"{field} {why}", field)
