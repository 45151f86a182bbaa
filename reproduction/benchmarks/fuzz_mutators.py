"""Mutations of input files that know their structure, so that the code behind the parsers is reached.

A mutator is a function (data, random numbers) -> data. It returns data that it cannot parse changed at
random places.
"""

from __future__ import annotations

import io
import json
import math
import random
import zipfile
from collections.abc import Callable
from typing import Any

from fishleg.formats.tensor_files import checksum

Mutator = Callable[[bytes, random.Random], bytes]
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 64, 65, 255, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, -1, -8)
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8, "F4": 1, "F99": 4,
}  # fmt: skip
NAMES = (
    ".$mask", ".$values", ".$shape", "module.", "_orig_mod.", "", "\x1b[31m", "\n", "0.weight", "0.bias",
    "1.running_mean", "1.num_batches_tracked", "3.weight",
)  # fmt: skip
SPECIAL = (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 8, b"\0" * 8, b"\xc0\x7f", b"\0\x7e")  # NaN, Inf, ...
TOKENS = (
    "[model]", "[run]", "[pruning]", "[schedule]", "[auxiliary]", "[fine_tuning]", "[data]", "[[run]]",
    "sparsity", "sparsities", "max_drop", "max_flops", "threads", "seed", "out", "mode", "gradual", "pattern",
    "2:4", "exclude", "betas", "1%", "nan", "inf", "-1", "1e400", "0x" + "f" * 2000, "9" * 5000, "&a", "*a",
    "<<", "!!set", "!!binary", "!!python/object:os.system", "{", "}", "[", "]", ":", "=", "'", '"', '"""',
    "\\ud800", "\\u0000", "\0", "\n", "- ", "? ", "|", "true", "null", "none", "1979-05-27", "a.b.c",
    "[" * 50, "{a: " * 50, "1_000", "::1:2", "#", "%YAML 1.1", "---", "...", "\u202e", "\x1b",
)  # fmt: skip


def mutate_bytes(data: bytes, source: random.Random) -> bytes:
    """Flip, insert, delete, copy or overwrite a few bytes."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 4, 9))):
        place = source.randrange(len(changed) + 1)
        length = source.choice((1, 1, 2, 4, 8, 32))
        what = source.randrange(5)
        if what == 0 and place < len(changed):
            changed[place] ^= 1 << source.randrange(8)
        elif what == 1:
            del changed[place : place + length]
        elif what == 2:
            changed[place:place] = source.randbytes(length)
        elif what == 3:
            changed[place : place + 8] = source.choice(SPECIAL)
        else:
            start = source.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + length]
    return bytes(changed)


def mutate_text(data: bytes, source: random.Random) -> bytes:
    """Insert words of recipes, or move, repeat and delete lines. The first byte tells the format."""
    lines = data[1:].split(b"\n")
    what, place = source.randrange(5), source.randrange(len(lines))
    if what == 0:
        return data[:1] + mutate_bytes(data[1:], source)
    if what == 1:
        line = lines[place]
        at, end = sorted((source.randrange(len(line) + 1), source.randrange(len(line) + 1)))
        lines[place] = line[:at] + source.choice(TOKENS).encode() + line[source.choice((at, end)) :]
    elif what == 2:
        lines.insert(place, source.choice(lines))
    elif what == 3:
        del lines[place]
    else:
        key = source.choice(TOKENS) + source.choice((" = ", ": ", "")) + source.choice(TOKENS)
        lines.insert(place, key.encode())
    return data[:1] + b"\n".join(lines)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file; a ValueError if it is none."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data):
        raise ValueError("truncated")
    header = json.loads(data[8:end])
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("no header")
    return header, data[end:]


def join_safetensors(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def mutate_safetensors(data: bytes, source: random.Random) -> bytes:
    """Change shapes, element types, names and values, and keep the offsets consistent."""
    if source.random() < 0.1:
        return mutate_bytes(data, source)
    try:
        header, body = split_safetensors(data)
        entries = {
            name: (entry["dtype"], list(entry["shape"]), body[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        metadata = dict(header.get("__metadata__", {}))
        for _ in range(source.choice((1, 1, 2, 3))):
            _mutate_entry(entries, metadata, source)
        return _serialized(entries, metadata)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError):
        return mutate_bytes(data, source)


def _mutate_entry(entries: dict[str, Any], metadata: dict[str, str], source: random.Random) -> None:
    name = source.choice(list(entries))
    dtype, shape, values = entries[name]
    what = source.randrange(8)
    if what == 0:  # another size, with the data cut or filled up
        shape = shape or [1]
        shape[source.randrange(len(shape))] = source.choice(NUMBERS)
        entries[name] = (dtype, shape, _resized(values, dtype, shape))
    elif what == 1:  # another element type
        dtype = source.choice(list(SIZES))
        entries[name] = (dtype, shape, _resized(values, dtype, shape))
    elif what == 2:
        entries[source.choice((name + source.choice(NAMES), source.choice(NAMES) + name))] = entries.pop(name)
    elif what == 3 and len(entries) > 1:
        del entries[name]
    elif what == 4:
        base = name.rsplit(".$", 1)[0]
        entries[base + source.choice(NAMES)] = entries[name]
    elif what == 5:
        entries[name] = (dtype, shape, (mutate_bytes(values, source) + values)[: len(values)])
    elif what == 6:
        shape = source.choice((shape[::-1], [*shape, 1], shape[1:], [math.prod(shape)]))
        entries[name] = (dtype, shape, _resized(values, dtype, shape))
    else:
        key = source.choice(("fishleg_shrunk", "recipe", "format", *NAMES))
        metadata[key] = source.choice(("yes", "\x1b[2J", *TOKENS[:5]))


def _resized(values: bytes, dtype: str, shape: list[int]) -> bytes:
    length = min(max(0, math.prod(shape) * SIZES.get(dtype, 4)), 4096)
    return (values * (1 + length // max(1, len(values))))[:length].ljust(length, b"\0")


def _serialized(entries: dict[str, Any], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, (dtype, shape, values) in entries.items():
        offsets = [len(body), len(body) + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += values
    return join_safetensors(header, body)


def mutate_checkpoint(data: bytes, source: random.Random) -> bytes:
    """Change the structure or the tensors, and compute the checksum anew."""
    try:
        header, body = split_safetensors(data)
        metadata = dict(header["__metadata__"])
        if source.random() < 0.7:
            structure = json.loads(metadata["structure"])
            metadata["structure"] = json.dumps(_mutate_json(structure, source, depth=0))
        elif source.random() < 0.5:
            metadata["structure"] = mutate_text(b" " + metadata["structure"].encode(), source).decode()
        header["__metadata__"] = metadata
        data = join_safetensors(header, body)
        if source.random() < 0.3:
            data = mutate_safetensors(data, source)
        return with_checksum(data)
    except (ValueError, KeyError, TypeError, RecursionError):
        return mutate_bytes(data, source)


def with_checksum(data: bytes) -> bytes:
    """A checkpoint with the right checksum; unchanged if its tensors cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = {name: tensor for name, tensor in load(data).items() if name}
        header, body = split_safetensors(data)
        metadata = header["__metadata__"]
        metadata["sha256"] = checksum(tensors, metadata["structure"])
        return join_safetensors(header, body)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, RecursionError):
        return data


def _mutate_json(value: Any, source: random.Random, depth: int) -> Any:
    """Replace one node of a JSON value by something else."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    if inner and depth < 50 and source.random() < 0.85:
        key, item = source.choice(inner)
        changed = dict(value) if isinstance(value, dict) else list(value)
        changed[key] = _mutate_json(item, source, depth + 1)
        return changed
    nested: Any = value
    for _ in range(source.choice((1, 1, 3, 400))):
        nested = source.choice(([nested], {"$tuple": [nested]}, {"$dict": [["a", nested]]}))
    keys = ("$tensor", "$tuple", "$dict", "$list", "model", "masks")
    values = [
        None, True, 0, -1, 1e400, "", "0", "model", [], {}, [value, value], nested, {"$dict": [[[], 1]]},
        {source.choice(keys): value}, {"$tensor": source.choice(("0", "1", "99", 0))},
        {"$dict": [[value, value]]}, source.choice(NUMBERS),
    ]  # fmt: skip
    return source.choice(values)


def mutate_torch_file(data: bytes, source: random.Random) -> bytes:
    """Change one entry of a torch file, mostly its pickle, and write a correct archive."""
    if source.random() < 0.1:
        return mutate_bytes(data, source)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename: archive.read(entry) for entry in archive.infolist()[:20]}
        name = source.choice([n for n in entries if n.endswith("data.pkl")] * 8 + list(entries))
        entries[name] = mutate_bytes(entries[name], source)
        if source.random() < 0.05:
            entries[source.choice(list(entries))] = b"\0" * 4096
        method = zipfile.ZIP_DEFLATED if source.random() < 0.05 else zipfile.ZIP_STORED
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for entry, content in entries.items():
                archive.writestr(zipfile.ZipInfo(entry), content, compress_type=method)
        return out.getvalue()
    except (ValueError, KeyError, IndexError, NotImplementedError, RuntimeError, EOFError, OSError,
            zipfile.BadZipFile, zipfile.zlib.error):  # fmt: skip
        return mutate_bytes(data, source)


def mutate_state_dict(data: bytes, source: random.Random) -> bytes:
    """A torch file or a safetensors file; the first byte tells which."""
    inner = mutate_torch_file if data[:1] == b"p" else mutate_safetensors
    return data[:1] + inner(data[1:], source)
