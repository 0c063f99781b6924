"""Adapters in files that torch.save wrote (adapter_model.bin). Only tensors are unpickled, never code."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.adapters.folder import DTYPES, MAX_HEADER_BYTES, wrong_dtype
from quire.adapters.layout import Shape
from quire.errors import AdapterError, short_repr
from quire.loading.stored_tensor import as_bytes

DTYPE_NAMES = {getattr(torch, ours): theirs for theirs, ours in DTYPES.items()}


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of the file."""
    try:
        _check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise AdapterError(f"{path}: not a file saved by torch 1.6 or later: convert it to safetensors") from error
    except pickle.UnpicklingError as error:
        raise AdapterError(
            f"{path}: refused: it contains more than tensors, or is damaged ({str(error).splitlines()[0]}). "
            "Convert it to safetensors on a machine you trust"
        ) from error
    except AdapterError:
        raise
    except Exception as error:  # A damaged pickle raises whatever its instructions lead to.
        raise AdapterError(f"{path}: damaged or unreadable: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(loaded, dict) or not loaded:
        raise AdapterError(f"{path}: not a dictionary of named tensors")
    return {name: _checked(path, name, tensor) for name, tensor in loaded.items()}


def _check_archive(path: Path) -> None:
    """Its parts are as large as they say: nothing is unpacked, and the pickle is small."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise AdapterError(f"{path}: a compressed archive, which torch.save does not write: refused")
            if entry.filename.endswith("data.pkl") and entry.file_size > MAX_HEADER_BYTES:
                raise AdapterError(
                    f"{path}: {entry.filename} has {entry.file_size} bytes; at most {MAX_HEADER_BYTES} are read"
                )


def _checked(path: Path, name: object, tensor: object) -> Tensor:
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise AdapterError(f"{path}: {short_repr(name)} is not a dense tensor")
    if tensor.dtype not in DTYPE_NAMES:
        raise wrong_dtype(path, name, str(tensor.dtype))
    if tensor.device.type != "cpu" or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise AdapterError(f"{path}: the tensor {short_repr(name)} claims more values than the file has for it")
    return tensor.detach().contiguous()


def tensor_values(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Shape, list[memoryview]]]:
    """Tensors as the digest takes them."""
    for name, tensor in sorted(tensors.items()):
        yield name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), [as_bytes(tensor.contiguous()).numpy().data]
