"""Write ZIP archives by hand, each field changeable, so that tests can say exactly what is wrong with one.

``archive(checkpoint())`` is a good torch-like file; every keyword makes it different in one place.
"""

import dataclasses
import struct
import zlib

LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END_64, LOCATOR_64, DESCRIPTOR = b"PK\6\6", b"PK\6\7", b"PK\7\x08"
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF

PICKLE = b"\x80\x02}q\x00."  # an empty dict


@dataclasses.dataclass
class Entry:
    """One record. What is None is written as it should be; the rest is written as it stands."""

    name: str | bytes
    data: bytes = b""
    method: int = 0  # 8 deflates
    flags: int = 0x0800
    crc: int | None = None
    nbytes: int | None = None
    stored: int | None = None
    offset: int | None = None  # of the local header, as the directory says
    disk: int = 0
    extra: bytes = b""  # in the directory
    wide: bool = False  # sizes and offset in a zip64 extra
    local: bool = True  # False: no local header and no data
    local_name: str | bytes | None = None
    local_flags: int | None = None
    local_signature: bytes = LOCAL
    align: int = 64  # 0: no padding
    descriptor: bool = False

    def __post_init__(self):
        self.name = as_bytes(self.name)
        self.local_name = self.name if self.local_name is None else as_bytes(self.local_name)
        self.content = self.data
        if self.method == 8:
            stream = zlib.compressobj(9, zlib.DEFLATED, -15)
            self.content = stream.compress(self.data) + stream.flush()
        self.crc = zlib.crc32(self.data) if self.crc is None else self.crc
        self.nbytes = len(self.data) if self.nbytes is None else self.nbytes
        self.stored = len(self.content) if self.stored is None else self.stored


def as_bytes(text):
    return text.encode() if isinstance(text, str) else text


def checkpoint(storages=(b"\0\0\x80?" * 4,), root="archive/", **records):
    """The entries of a torch.save file: ``records`` changes (None removes) byteorder, version and the like."""
    content = {
        "data.pkl": PICKLE,
        "byteorder": b"little",
        **{f"data/{key}": data for key, data in enumerate(storages)},
        "version": b"3\n",
    }
    content.update({name.replace("__", "."): data for name, data in records.items()})
    return [Entry(root + name, data) for name, data in content.items() if data is not None]


def local_part(entry, at):
    """A local header, the data, and the descriptor if there is one."""
    flags = entry.flags if entry.local_flags is None else entry.local_flags
    numbers = (entry.crc, min(entry.stored, MAX32), min(entry.nbytes, MAX32))
    tail = b""
    if entry.descriptor:
        tail = DESCRIPTOR + struct.pack("<III", *numbers)
        flags, numbers = flags | 8, (0, 0, 0)
    padding = b""
    if entry.align:
        n = -(at + 30 + len(entry.local_name) + 4) % entry.align
        padding = b"FB" + struct.pack("<H", n) + b"Z" * n
    header = struct.pack(
        "<HHHHHIIIHH", 0, flags, entry.method, 0, 0, *numbers, len(entry.local_name), len(padding)
    )
    return entry.local_signature + header + entry.local_name + padding + entry.content + tail


def central_part(entry, offset):
    """A directory entry."""
    offset = offset if entry.offset is None else entry.offset
    stored, nbytes, extra = entry.stored, entry.nbytes, entry.extra
    if entry.wide or max(stored, nbytes, offset) > MAX32:
        extra = struct.pack("<HHQQQ", 1, 24, nbytes, stored, offset) + extra
        stored = nbytes = offset = MAX32
    return (
        CENTRAL
        + struct.pack(
            "<HHHHHHIII", 0, 0, entry.flags, entry.method, 0, 0, entry.crc, stored, nbytes
        )
        + struct.pack("<HHHHHII", len(entry.name), len(extra), 0, entry.disk, 0, 0, offset)
        + entry.name
        + extra
    )


def archive(
    entries,
    *,
    before=b"",
    counted=True,
    behind=b"",
    comment=b"",
    comment_nbytes=None,
    wide=False,
    end=(),
    end_64=(),
    locator=(),
    gap=b"",
    directory_order=None,
):
    """A whole archive.

    ``before``: bytes in front, ``counted`` in the offsets or not; ``behind``: bytes after it; ``wide``: zip64 end
    records; ``end``, ``end_64``, ``locator``: fields to change, by name; ``gap``: bytes between directory and end.
    """
    out = bytearray(before)
    origin = 0 if counted else len(before)
    central = []
    for entry in entries:
        offset = len(out) - origin
        if entry.local:
            out += local_part(entry, offset)
        central.append(central_part(entry, offset))
    if directory_order:
        central = [central[i] for i in directory_order]
    start = len(out) - origin
    out += b"".join(central) + gap
    numbers = {
        "disk": 0,
        "directory_disk": 0,
        "here": len(central),
        "count": len(central),
        "nbytes": sum(map(len, central)),
        "offset": start,
    }
    if wide:
        wide_at = len(out) - origin
        fields = {"size": 44, **numbers, **dict(end_64)}
        out += END_64 + struct.pack("<QHHIIQQQQ", fields.pop("size"), 45, 45, *fields.values())
        fields = {"disk": 0, "offset": wide_at, "disks": 1, **dict(locator)}
        out += LOCATOR_64 + struct.pack("<IQI", *fields.values())
    limits = (MAX16, MAX16, MAX16, MAX16, MAX32, MAX32)
    fields = {
        key: min(value, limit) for (key, value), limit in zip(numbers.items(), limits, strict=True)
    }
    fields["comment"] = len(comment) if comment_nbytes is None else comment_nbytes
    fields.update(end)
    out += END + struct.pack("<HHHHIIH", *fields.values()) + comment
    return bytes(out + behind)
