"""The files of a checkpoint folder, which may be broken or hostile: JSON tables, and tensors in safetensors files.

A ValueError names the file that is broken. No file outside the folder is read: a link may lead to another file of the
folder or, as in the cache of Hugging Face, from `snapshots/…` to the `blobs` beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
}
_LARGEST = 2**48  # bytes, or values of a dimension
_LONGEST_TEXT = 100_000_000  # bytes of a JSON file or a header, as safetensors has it


@dataclasses.dataclass(frozen=True)
class Unread:
    """A stored tensor of a dtype that is not read."""

    dtype: str
    shape: tuple[int, ...]
    filename: Path


@contextlib.contextmanager
def named(source: object) -> Iterator[None]:
    """Puts a file's name before the message of a ValueError; nesting that is too deep and what the system says are
    one, too."""
    try:
        yield
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{source}: {error}") from error


def path_in(folder: Path, name: str) -> Path:
    """The path of a file of the folder.

    Raises:
      FileNotFoundError: the folder lacks it.
      ValueError: it is no regular file, or a link that leads out of the folder.
    """
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve()
        snapshots = next((parent for parent in root.parents if parent.name == "snapshots"), None)
        blobs = snapshots and (snapshots.parent / "blobs").resolve()
        is_inside, exists, is_file = target.is_relative_to(root), target.exists(), target.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not is_inside and target.parent != blobs:
        raise ValueError(f"{path}: a link that leads out of the folder, to {target}")
    if not exists:
        raise FileNotFoundError(f"{folder} lacks {name}")
    if not is_file:
        raise ValueError(f"{path}: not a regular file")
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object of a file of the folder."""
    path = path_in(folder, name)
    with named(path):
        return _json_object(_text_of(path))


def _text_of(path: Path) -> bytes:
    _check_length(path.stat().st_size)
    return path.read_bytes()


def _check_length(length: int) -> None:
    if length > _LONGEST_TEXT:
        raise ValueError(f"must have at most {_LONGEST_TEXT} bytes of JSON, got {length}")


def _json_object(data: bytes, *, unique: bool = False) -> dict[str, Any]:
    if data.startswith(b"version https://git-lfs"):
        raise ValueError("a Git LFS pointer stands here instead of the file")
    value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return table


def map_folder(folder: Path) -> dict[str, Any]:
    """The tensors of a folder, mapped: they are read when they are used.

    A name is read from the file that the index names; without an index, from the one file that has it.
    """
    if os.path.lexists(folder / INDEX):
        file_of = _weight_map(folder)
        files = sorted(set(file_of.values()))
        if missing := [file for file in files if not os.path.lexists(folder / file)]:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}, which its index names")
        shards = {file: map_file(path_in(folder, file)) for file in files}
        for name, file in file_of.items():
            if name not in shards[file]:
                raise ValueError(f"{folder / INDEX}: {name} is not in {file}, which the index names for it")
        return {name: shards[file][name] for name, file in file_of.items()}
    if not (files := sorted(path.name for path in folder.glob("*.safetensors"))):
        raise FileNotFoundError(f"no safetensors file in {folder}")
    arrays: dict[str, Any] = {}
    for file in files:
        tensors = map_file(path_in(folder, file))
        if twice := min(arrays.keys() & tensors.keys(), default=None):
            raise ValueError(f"{folder / file}: {twice} is in {arrays[twice].filename.name} too, and no index decides")
        arrays |= tensors
    return arrays


def _weight_map(folder: Path) -> dict[str, str]:
    path = path_in(folder, INDEX)
    with named(path):
        table = _json_object(_text_of(path), unique=True).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
            raise ValueError("weight_map must be a table of tensors' names and the files that have them")
        for file in table.values():
            if file in ("", ".", "..") or set(file) & set("/\\\0"):
                raise ValueError(f"weight_map must name files of the folder, got {file!r}")
    return table


def map_file(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file by name: mapped arrays, and `Unread` for other dtypes."""
    with named(path):
        size = path.stat().st_size
        if size < 8:
            raise ValueError(f"no safetensors file: it has {size} bytes")
        data = np.memmap(path, np.uint8, mode="r")
        data.filename = path  # else the file that a link leads to
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        if start > size:
            pointer = ", but a Git LFS pointer" if data[:8].tobytes() == b"version " else ""
            raise ValueError(f"no safetensors file{pointer}: its header would be longer than the file")
        with named("no safetensors file by its header"):
            _check_length(start - 8)
            header = _json_object(data[8:start].tobytes(), unique=True)
            header.pop("__metadata__", None)
            _check_header(header)
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if first != end or last < first:
                raise ValueError(f"data_offsets of {name} must begin at {end}, got {entry['data_offsets']}")
            if start + (end := last) > size:
                raise ValueError(f"the file is cut short: {name} ends behind it")
        if start + end < size:
            raise ValueError(f"{size - start - end} bytes stand behind the last tensor")
        return {name: _array(name, entry, data[start:], path) for name, entry in header.items()}


def _check_header(header: dict[str, Any]) -> None:
    for name, entry in header.items():
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
        is_dtype = isinstance(dtype, str) and re.fullmatch("[A-Z][A-Z0-9_]*", dtype)
        if not is_dtype or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 32:
            raise ValueError(f"{name} must have a dtype, a shape and two data_offsets")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _LARGEST for value in values)


def _array(name: str, entry: dict[str, Any], data: np.memmap, path: Path) -> np.memmap | Unread:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        return Unread(dtype, shape, path)
    needed = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if needed != last - first:
        raise ValueError(f"{name} of shape {list(shape)} in {dtype} needs {needed} bytes, got {last - first}")
    return data[first:last].view(DTYPES[dtype]).reshape(shape)
