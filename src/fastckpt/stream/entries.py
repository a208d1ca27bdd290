"""torch's own streams (torch.distributed._serialization): a pickled table of records, then the records of a ZIP checkpoint."""

import operator
import pickletools
import sys

from .._pickler import dump
from .._stack import skim
from .._unpickler import PIDS_ZIP, unpickle
from ..containers.sniff import MAGIC as LEGACY_MAGIC
from ..errors import CheckpointError
from ..importing import importing
from ..nodes import Opaque, short
from .contents import Contents, bounded, error
from .layout import Layout
from .sending import Outgoing

PICKLE, BYTEORDER, STORAGES = "data.pkl", "byteorder", "data/"
MOST_AHEAD = 1 << 20  # bytes of the table that are read at a time
FIRST_ROW_NBYTES = 1 << 10  # within which the first row of a table ends


class Entry:
    """A row of the table; pickled as torch's own class, which reads it."""

    def __init__(self, key, is_storage, length):
        self.key, self.is_storage, self.length = key, is_storage, length


TORCHS_NAME = {Entry: ("torch.distributed._serialization", "_Entry")}


def write(obj, *, pickle_protocol=2, **_):
    """What is Outgoing for an object."""
    with importing:
        from ..describing import describe

    described = describe(obj, pickle_protocol)
    texts = {
        PICKLE: described.pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        BYTEORDER: sys.byteorder.encode(),
    }
    table = [Entry(key, False, len(text)) for key, text in texts.items()]
    table += [Entry(f"{STORAGES}{i}", True, n) for i, n in enumerate(described.nbytes.tolist())]
    head = b"".join([dump(table, 2, foreign=TORCHS_NAME), *texts.values()])
    layout = Layout(described.nbytes)
    return Outgoing(head, described.address, layout, described.blocks, described)


def read(inlet, begin, limits, tolerant):
    """Contents of a stream that begins with the bytes ``begin``, which were read from ``inlet``."""
    entries = read_table(inlet, begin, limits)
    texts, pickle_offset = {}, 0
    while entries and not entries[0][0].startswith(STORAGES):
        key, nbytes = entries.pop(0)
        if key == PICKLE:
            pickle_offset = inlet.position
        what = f"record {key!r}"
        bounded(inlet, nbytes, what, limits)
        texts[key] = inlet.read(nbytes, what)
    if PICKLE not in texts:
        raise error(inlet, f"there is no record {PICKLE!r} before the storages")
    byteorder = bytes(texts.get(BYTEORDER, b"little")).decode("latin-1")
    if byteorder not in ("little", "big"):
        raise error(inlet, f"its byteorder is {byteorder!r:.40}, 'little' or 'big' is expected")
    unpickled = unpickle(
        texts[PICKLE],
        pids=PIDS_ZIP,
        where=f"{inlet.name}: record {PICKLE!r}",
        offset=pickle_offset,
        limits=limits,
        tolerant=tolerant,
    )
    names = [key for key, _ in entries]
    rows = {
        name.removeprefix(STORAGES): row
        for row, name in enumerate(names)
        if name.startswith(STORAGES)
    }
    layout = Layout([nbytes for _, nbytes in entries])
    return Contents(inlet, unpickled, texts[PICKLE], names, rows, layout, byteorder)


def read_table(inlet, begin, limits):
    """[(key, nbytes)] in the order of the stream."""
    data = read_pickle(inlet, begin, limits)
    rows = unpickle(data, where=f"{inlet.name}: the table of records", limits=limits).obj
    if rows == LEGACY_MAGIC:
        raise error(
            inlet,
            "this is a legacy checkpoint of torch.save, not a stream; load() reads it, from a file",
        )
    entries = {}
    for row in rows if isinstance(rows, list) else ():
        key, nbytes = entry_of(inlet, row)
        if key in entries:  # at once: a row that occurs again takes two bytes
            raise error(inlet, f"the table of records names {short(key)} twice")
        entries[key] = nbytes
    if not entries:
        raise error(inlet, f"a pickle of {short(rows)}; a table of records is expected")
    if sum(entries.values()) > 1 << 62:
        raise error(inlet, "the table of records has sizes that cannot be")
    return list(entries.items())


def entry_of(inlet, row):
    if isinstance(row, Opaque) and row.qualname.endswith("._Entry") and type(row.state) is dict:
        key, nbytes = row.state.get("key"), row.state.get("length")
        if type(key) is str and type(nbytes) is int and nbytes >= 0:
            return key, nbytes
    raise error(
        inlet,
        f"a row of the table is {short(row)}; torch's _Entry of a key and a length is expected",
    )


def read_pickle(inlet, begin, limits):
    """The bytes of the table. Nothing says how many they are, and what is read beyond STOP must belong to the stream.

    What must follow is known: the rest of an opcode, and soon the record that the first row of the table speaks of, the
    pickle of the object, which is about as long as the table.
    """
    data, at, record_nbytes = bytearray(begin), 0, 0
    while True:
        at, needed = skim(data, at)
        if needed <= 0:  # ended, or no pickle: reading it will say so
            end = at if needed == 0 else len(data)
            inlet.unread(data[end:])
            return data[:end]
        if at <= FIRST_ROW_NBYTES and not record_nbytes:
            record_nbytes = first_record_nbytes(data[:at])
        more = at + needed + record_nbytes - len(data)
        bounded(inlet, at + needed, "the table of records", limits)
        data += inlet.read(min(more, MOST_AHEAD), "the table of records")


def first_record_nbytes(data):
    """How many bytes the first row of a table announces; 0 as long as it is not there."""
    try:
        for opcode, _, at in pickletools.genops(bytes(data)):
            if opcode.name == "BUILD":
                rows = unpickle(data[: at + 1] + b"e.").obj  # as if it were the only one
                return max(0, operator.index(rows[0].state["length"]))
    except (CheckpointError, ValueError, TypeError, LookupError, AttributeError):
        pass  # it has not all arrived, or reading the table will say what is wrong
    return 0
