"""Legacy streams and tars: into pickles, numbers and data, and back. A tar is several streams, one a member."""

import io
import pickletools
import tarfile

from fastckpt.contents import open_contents
from fastckpt.source import open_source

from .part import Part

BLOCK = 512
# The numbers of a tar header, as (offset, bytes): text in octal, but the last, which is the type.
TAR_NUMBERS = ((100, 8), (124, 12), (136, 12), (148, 8), (156, 1))


def legacy_parts(data):
    """Five pickles, then a count and data for each storage, then what is behind them."""
    contents = open_contents(open_source(data))
    parts = stream_parts("", data, 0, contents.end, contents.records)
    return parts + [Part("", "data", data[contents.end :])] * (contents.end < len(data))


def tar_parts(data):
    """The parts of each member."""
    contents = open_contents(open_source(data))
    parts = []
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        for member in file:
            start, end = member.offset_data, member.offset_data + member.size
            if member.name == "tensors":
                parts += tensor_parts(data, start, end)
            elif member.name in ("sys_info", "pickle", "storages"):
                parts += stream_parts(member.name, data, start, end, contents.records)
            else:
                parts.append(Part(member.name, "data", data[start:end]))
    return parts


def stream_parts(name, data, start, end, records):
    """Pickles, and storages where they are known to lie."""
    storages = dict(zip(records.offset.tolist(), records.nbytes.tolist(), strict=True))
    parts = []
    while start < end:
        if start + 8 in storages and storages[start + 8] + 8 <= end - start:
            nbytes = storages.pop(start + 8)
            parts += [
                Part(name, "number", data[start : start + 8]),
                Part(name, "data", data[start + 8 : start + 8 + nbytes]),
            ]
            start += 8 + nbytes
        else:
            pickle = pickle_at(data, start)
            parts.append(Part(name, "pickle", pickle))
            start += len(pickle)
    return parts


def tensor_parts(data, start, end):
    """The member ``tensors``: a pickled count, then for each a pickle and its numbers."""
    parts = [Part("tensors", "pickle", pickle_at(data, start))]
    start += len(parts[0].data)
    while start < end:
        pickle = pickle_at(data, start)
        parts.append(Part("tensors", "pickle", pickle))
        start += len(pickle)
        ndim = int.from_bytes(data[start : start + 4], "little")
        for _ in range(2 + 2 * ndim):  # dimensions and padding, sizes, strides, offset
            parts.append(Part("tensors", "number", data[start : start + 8]))
            start += 8
    return parts


def pickle_at(data, start):
    """The bytes of the pickle that begins there."""
    stream = io.BytesIO(data)
    stream.seek(start)
    for _ in pickletools.genops(stream):
        pass
    return data[start : stream.tell()]


def legacy_packed(rng, parts):
    return b"".join(part.data for part in parts)


def tar_packed(rng, parts):
    """A tar of members that consist of the runs of parts with one name."""
    form = rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
    out, members = io.BytesIO(), []
    for part in parts:
        if not members or members[-1][0] != part.name:
            members.append((part.name, bytearray()))
        members[-1][1].extend(part.data)
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_headers(data):
    """Where headers stand, as far as one can tell."""
    return [
        at for at in range(0, len(data) - BLOCK + 1, BLOCK) if data[at + 257 : at + 262] == b"ustar"
    ]


def tar_numbers(data):
    return [(at + offset, n) for at in tar_headers(data) for offset, n in TAR_NUMBERS]


def tar_repaired(data):
    """The tar with the checksums of its headers made right."""
    out = bytearray(data)
    for at in tar_headers(data):
        header = out[at : at + BLOCK]
        header[148:156] = b" " * 8
        out[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    return bytes(out)
