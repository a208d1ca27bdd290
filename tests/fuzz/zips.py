"""ZIP checkpoints: into records and back, where their numbers stand, and checksums made right again."""

import io
import struct
import zipfile
import zlib

from zipcraft import Entry, archive

from .part import Part

# What each structure begins with, and its numbers as (offset, bytes).
STRUCTURES = {
    b"PK\3\4": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\1\2": ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (34, 2), (42, 4)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\6\6": ((4, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\6\7": ((4, 4), (8, 8), (16, 4)),
    b"PK\7\x08": ((4, 4), (8, 4), (12, 4)),
    b"\1\0\x18\0": ((4, 8), (12, 8), (20, 8)),  # a zip64 extra field of three numbers
}  # fmt: skip
MAX32 = 0xFFFFFFFF


def parts_of(data):
    """The records of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return [
            Part(info.filename, kind_of(info.filename), file.read(info)) for info in file.infolist()
        ]


def kind_of(name):
    folder, _, last = name.rpartition("/")
    if last == "data.pkl":
        return "pickle"
    return "data" if folder.endswith(("data", "tensors")) else "text"


def packed(rng, parts):
    """An archive of these records, as torch would write it or in a way that it would not."""
    odd = rng.random() < 0.3
    options = {}
    if odd:
        options = {
            "method": rng.choice((0, 0, 8)),
            "wide": rng.random() < 0.3,
            "descriptor": rng.random() < 0.3,
        }
        options["align"] = rng.choice((0, 1, 64))
        if rng.random() < 0.1:
            options["crc"] = 0  # as where none is computed
    names = [part.name.encode("utf-8", "surrogateescape") for part in parts]
    entries = [Entry(name, part.data, **options) for name, part in zip(names, parts, strict=True)]
    whole = {"wide": rng.random() < 0.7}
    if odd:
        whole["before"], whole["counted"] = (
            rng.choice((b"", b"", b"#!/bin/sh\n")),
            rng.random() < 0.5,
        )
        whole["comment"] = rng.choice((b"", b"", b"PK\5\6" + b"\0" * 18, b"x" * 30))
        whole["behind"], whole["gap"] = (
            rng.choice((b"", b"", b"\0" * 40)),
            rng.choice((b"", b"", b"", b"PK")),
        )
        if rng.random() < 0.3:
            whole["directory_order"] = rng.sample(range(len(entries)), len(entries))
    return archive(entries, **whole)


def numbers_of(data):
    """(offset, bytes) of every number in a header, a directory entry or an end record, also where they are damaged."""
    found = []
    for signature, fields in STRUCTURES.items():
        at = data.find(signature)
        while at >= 0:
            found += [(at + offset, n) for offset, n in fields if at + offset + n <= len(data)]
            at = data.find(signature, at + 1)
    return found


def repaired(data):
    """The archive with the CRC-32 of each record that can be found made that of its bytes, in all three places."""
    out = bytearray(data)
    at = data.find(b"PK\1\2")
    while at >= 0:
        repair_record(data, out, at)
        at = data.find(b"PK\1\2", at + 1)
    return bytes(out)


def repair_record(data, out, entry):
    """Do so for the record of a directory entry."""
    if len(data) - entry < 46:
        return
    method, _, _, _, stored, nbytes, name, extra = struct.unpack_from("<HHHIIIHH", data, entry + 10)
    (header,) = struct.unpack_from("<I", data, entry + 42)
    if MAX32 in (
        stored,
        nbytes,
        header,
    ):  # the others are those of the extra field that zipcraft and torch write
        wide = data[entry + 46 + name : entry + 46 + name + extra]
        there = [
            struct.unpack_from("<Q", wide, 4 + 8 * i)[0] for i in range((len(wide) - 4) // 8)
        ] + [MAX32] * 3
        nbytes, stored, header = (
            there.pop(0) if n == MAX32 else n for n in (nbytes, stored, header)
        )
    if header > len(data) - 30 or data[header : header + 4] != b"PK\3\4":
        return
    start = header + 30 + sum(struct.unpack_from("<HH", data, header + 26))
    content = data[start : start + stored]
    if len(content) != stored:
        return
    if method == 8:
        try:
            content = zlib.decompressobj(-15).decompress(content, 1 << 20)
        except zlib.error:
            return
    right = struct.pack("<I", zlib.crc32(content))
    out[entry + 16 : entry + 20] = right
    if data[header + 14 : header + 18] != bytes(4):
        out[header + 14 : header + 18] = right
    if data[start + stored : start + stored + 4] == b"PK\7\x08":
        out[start + stored + 4 : start + stored + 8] = right
