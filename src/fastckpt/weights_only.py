"""Whether torch.load(weights_only=True) takes a file, by the rules of torch 2.13 without anything that was allowed to it.

What is asked is what torch checks, which is less than what is right: it looks at no CRC-32. Where devices are is left out.
"""

import collections
import re

import numpy as np

from ._stack import opcodes_of
from ._zip import HEADER, OK
from .containers._zip_directory import LOCAL_NBYTES
from .containers._zip_end import COMMENT_REACH, END_NBYTES, MAX16
from .containers._zip_names import (
    BYTEORDER_RECORD,
    PICKLE,
    TORCHSCRIPT_RECORD,
    VERSION_RECORDS,
    RecordNames,
    folded,
    is_text,
)
from .containers.zip import NEWEST_VERSION, OLDEST_VERSION, inflate, parse_version
from .containers.zip_writer import SERIALIZATION_ID
from .dtypes import CODE_BY_STORAGE, DTYPES, QUANTIZED, SUB_BYTE_NAMES
from .errors import FormatError
from .records import DEFLATED, STORED
from .torch_rows import QSCHEMES

OPCODES = b".(\x80c\x81Rbaesut\x85\x86\x87)]}\x8fN\x88\x89JKM\x8aGXUQhjqr"  # all of protocol 2 that state dicts need
# Names of Python 2 modules stand for those of today.
PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
REBUILD = """parameter parameter_with_state qtensor tensor tensor_v2 tensor_v3 sparse_tensor meta_tensor_no_storage nested_tensor
    wrapper_subclass device_tensor_from_numpy device_tensor_from_cpu_tensor""".split()
# torch writes them, and fails to read them: it has no bytes yet where it wants to look at some.
LEGACY_REFUSED = {"torch.storage.UntypedStorage", "torch._utils._rebuild_nested_tensor"}
# What of our own words for a broken stream torch would say, too; of others it is not known.
REFUSED_STREAM = re.compile(
    r"the magic number is|the protocol version is|interrupted copy or download"
)
# Where torch can put a storage: on its own devices, and on those that others are known to add to it.
LOCATION = re.compile(
    r"cpu|meta|mps.*|(cuda|xpu|hpu|mtia|xla|privateuseone|npu|mlu|musa)((:|[0-9]).*)?", re.DOTALL
)
FORMAT_VERSION, ALIGNMENT_RECORD = ".format_version", ".storage_alignment"
# Read on the way to the object, by those releases that know them, where they are there.
SMALL_RECORDS = (BYTEORDER_RECORD, ALIGNMENT_RECORD, FORMAT_VERSION, SERIALIZATION_ID)
# torch looks for the end record in windows, each of which overlaps the one behind it by three bytes.
END_SIGNATURE, END_WINDOW = b"PK\5\6", 1 << 12
DISK_AT = 34  # of a directory entry
MOST_SMALL_NBYTES = 1 << 20
# Set on an entry of the directory, these make torch refuse to read it: encrypted, patch data, strong encryption.
UNREADABLE = 0x0001 | 0x0020 | 0x0040


def _allowed():
    yield from """collections.OrderedDict collections.Counter _codecs.encode builtins.bytearray builtins.set builtins.complex
        torch.nn.parameter.Parameter torch.serialization._get_layout torch.Size torch.Tensor torch.device
        torch.storage.TypedStorage torch.storage.UntypedStorage torch._tensor._rebuild_from_type_v2""".split()
    for name in (*(dtype.name for dtype in DTYPES), *SUB_BYTE_NAMES, *QSCHEMES):
        yield f"torch.{name}"
    for name in REBUILD:
        yield f"torch._utils._rebuild_{name}"
    for storage, code in CODE_BY_STORAGE.items():
        kind = storage.removesuffix("Storage")
        yield f"torch.{storage}"
        if code in QUANTIZED:
            continue
        yield f"torch.cuda.{storage}"
        if not kind.startswith("Complex"):
            yield from (f"torch.{kind}Tensor", f"torch.cuda.{kind}Tensor")
            if kind != "Bool":
                yield from (f"torch.sparse.{kind}Tensor", f"torch.cuda.sparse.{kind}Tensor")


ALLOWED = frozenset(_allowed())


def refused_names(names):
    """The qualnames, of Globals, that weights_only refuses."""
    found = (f"{PYTHON2.get(each.module, each.module)}.{each.name}" for each in names)
    return sorted({name for name in found if name not in ALLOWED})


def pickle_reasons(unpickled, data):
    """Why torch refuses the pickle of the object."""
    if names := refused_names(unpickled.names):
        yield f"the pickle names {shortened(names)}"
    yield from opcode_reasons(data, unpickled.undecodable)
    locations = {spec.location for spec in unpickled.storages}
    if nowhere := sorted(each for each in locations if not LOCATION.fullmatch(each)):
        yield f"storages are tagged with devices that are not known: {shortened([repr(each[:40]) for each in nowhere])}"


def opcode_reasons(data, undecodable):
    """Why torch refuses a pickle by its opcodes alone, or by a string that cannot be decoded."""
    if others := sorted(set(opcodes_of(data)) - set(OPCODES)):
        yield f"the pickle has opcodes that are not allowed: {', '.join(f'{op:#04x}' for op in others)}"
    if undecodable is not None:
        yield f"the pickle has a Python 2 string that is not UTF-8: {undecodable[:40]!r}"


def stream_reasons(contents):
    """Why torch refuses a legacy stream or a tar, whose object is read."""
    if contents.kind == "tar":
        yield "weights_only=True refuses every tar checkpoint"
        return
    for data, names, undecodable in contents.other_pickles():
        if refused := refused_names(names):
            yield f"a pickle before or behind that of the object names {shortened(refused)}"
        yield from opcode_reasons(data, undecodable)
    for name in LEGACY_REFUSED & {each.qualname for each in contents.unpickled.names}:
        yield f"{name} in a legacy stream is more than torch can read"
    for error in contents.problems:
        if "not in the list of storage keys" not in str(
            error
        ):  # such a storage stays what its memory was
            yield str(error)


def zip_reasons(survey, unpickled):
    """Why torch refuses a ZIP, and the records that it looks up in it. ``unpickled`` is None where that is not known."""
    archive = _Archive(survey)
    yield from archive.container_reasons()
    if archive.root is None:
        return
    yield from archive.small_record_reasons()
    names = [PICKLE, TORCHSCRIPT_RECORD, *VERSION_RECORDS, *SMALL_RECORDS]
    if unpickled is not None:
        roots = {spec.key: spec for spec in unpickled.storages}
        names += [f"data/{key}" for key in roots]
        problems = [
            problem for spec in roots.values() if (problem := archive.storage_problem(spec))
        ]
        if problems:
            yield shortened(problems, 1)
    if twins := archive.twins.intersection(names):
        shown = shortened([repr(name) for name in sorted(twins)])
        yield f"there are two records {shown}, and it may read the wrong one"


class _Archive:
    """A ZIP as torch sees it: the folder of the first entry, names in any case, the numbers of the directory."""

    def __init__(self, survey):
        self.survey, self.source = survey, survey.source
        # as they stand, backslashes and all
        names = list(RecordNames(survey.directory, survey.columns, 0))[: survey.end.entries]
        self.names = names
        folder, slash, _ = names[0].partition("/")
        self.root = folder + slash if slash else None
        self.rows = {folded(name): row for row, name in enumerate(names)}
        self.local_row = {int(row): i for i, row in enumerate(survey.good)}
        # The names, from the folder on, that more than one entry has.
        count = collections.Counter(names) if len(self.rows) < len(names) else {}
        self.twins = {name.removeprefix(folder + slash) for name in count if count[name] > 1}

    def container_reasons(self):
        survey, columns, records = self.survey, self.survey.columns, self.survey.records
        if bytes(self.source.read(0, 4)) != b"PK\3\4":
            yield "the file does not begin with a record (50 4b 03 04)"
        if survey.end.at != where_torch_looks(self.source) or survey.end.bias:
            yield "the end of the archive is not where torch looks for it"
        if survey.end.rival is not None:
            yield "there are two directories, and it may read the wrong one"
        if len(survey.all_names) < survey.end.entries or (survey.entry_status != OK).any():
            yield "the directory of the archive is damaged"
        elif (row := self.other_disk()) is not None:
            yield f"record {survey.names[row]!r} is said to lie on another disk"
        good = survey.good
        method, stored, nbytes = (
            c[good] for c in (records.method, records.stored_nbytes, records.nbytes)
        )
        wrong = (method == STORED) & (stored != nbytes) | (nbytes > 0) & (stored == 0)
        wrong |= stored > self.source.nbytes - columns[HEADER][good] - LOCAL_NBYTES
        if wrong.any():
            yield f"record {survey.names[good[wrong.argmax()]]!r} has a size that cannot be"
        if self.root is None:
            yield "the first record is in no folder"
            return
        if not all(map(is_text, self.names)):
            yield "the name of a record is not UTF-8"
        foreign = [name for name in self.names if not name.startswith(self.root)]
        if foreign:
            yield f"not all records are in the folder {self.root!r}: {shortened(foreign)}"

    def other_disk(self):
        """The first entry that lies on another disk than the end record, None where there is none."""
        entries = np.frombuffer(self.survey.directory, dtype=np.uint8)
        at = self.survey.places[: len(self.names)] + DISK_AT
        disks = entries[at].astype(np.int64) | entries[at + 1].astype(np.int64) << 8
        here = int.from_bytes(self.source.read(self.survey.end.at + 4, 2), "little")
        # Where the zip64 record says it, it is 0 or 1.
        elsewhere = (disks != (0 if here == MAX16 else here)) & (disks != 1) | (disks == MAX16)
        return int(elsewhere.argmax()) if elsewhere.any() else None

    def small_record_reasons(self):
        if self.row(TORCHSCRIPT_RECORD) is not None:
            yield "it is a TorchScript archive, which torch.jit.load reads"
        version = next((name for name in VERSION_RECORDS if self.row(name) is not None), None)
        if version is None:
            yield f"it has no version record; {OLDEST_VERSION} to {NEWEST_VERSION} are known"
        if problem := self.problem(PICKLE):
            yield problem
        for name in (version, *SMALL_RECORDS):
            if name is None or self.row(name) is None:
                continue
            problem = self.problem(name)
            if problem is None and (text := self.content(name)) is not None:
                problem = self.text_problem(name, text)
            if problem:
                yield problem

    def text_problem(self, name, text):
        """What torch cannot make of the content of a small record."""
        if name in VERSION_RECORDS:
            version = parse_version(text)
            if version is None or not OLDEST_VERSION <= version <= NEWEST_VERSION:
                return f"it has the version {text[:20]!r}; {OLDEST_VERSION} to {NEWEST_VERSION} are known"
        if name == BYTEORDER_RECORD and text not in (b"little", b"big"):
            return f"its byte order is {text[:20]!r}"
        try:
            if name == ALIGNMENT_RECORD:
                int(text)
            elif name == SERIALIZATION_ID:
                text.decode()
        except ValueError:
            wanted = "text in UTF-8" if name == SERIALIZATION_ID else "number"
            return f"record {name!r} is {text[:20]!r}, which is no {wanted}"
        return None

    def row(self, name):
        return self.rows.get(folded(self.root + name))

    def content(self, name):
        """The content of a record that has no problem, whatever else lies there; None where it is long, or does not inflate."""
        row, records = self.row(name), self.survey.records
        stored, nbytes = int(records.stored_nbytes[row]), int(records.nbytes[row])
        if max(stored, nbytes) > MOST_SMALL_NBYTES:
            return None
        if not stored:
            return b""
        data = bytes(self.source.read(int(self.survey.local.data[self.local_row[row]]), stored))
        return inflate(data, nbytes) if records.method[row] == DEFLATED else data

    def problem(self, name):
        """Why a record cannot be read, None where it can."""
        row = self.row(name)
        if row is None:
            return f"record {name!r} is missing"
        records, i = self.survey.records, self.local_row.get(row)
        local = self.survey.local
        if self.survey.flags[row] & UNREADABLE or records.method[row] not in (STORED, DEFLATED):
            return f"record {name!r} is encrypted, or compressed in a way that torch cannot read"
        if not records.stored_nbytes[row]:
            return None  # torch looks no further
        if i is None or not local.present[i]:
            return f"record {name!r} has no local header"
        if records.stored_nbytes[row] > self.source.nbytes - local.data[i]:
            return f"record {name!r} reaches over the end of the file"
        if row in self.survey.marked:
            return f"record {name!r} is marked as a folder, and torch would take whatever memory held for its content"
        return None

    def storage_problem(self, spec):
        name = f"data/{spec.key}"
        if problem := self.problem(name):
            return problem
        there = int(self.survey.records.nbytes[self.row(name)])
        if there != spec.nbytes:
            return f"record {name!r} has {there} bytes, the pickle says {spec.nbytes}"
        return None


def may_be_read(source):
    """Whether torch may make something of a file that is no checkpoint to us.

    It reads pickles in which the magic number is not the first thing, and end records that contradict themselves.
    """
    try:
        head = bytes(source.read(0, min(4, source.nbytes)))
        return head[:1] == b"\x80" or head == b"PK\3\4" and where_torch_looks(source) is not None
    except FormatError:  # it has become shorter
        return False


def where_torch_looks(source):
    """Where torch takes the end record to be, None where its search finds none."""
    start = max(0, source.nbytes - END_WINDOW)
    while True:
        window = bytes(source.read(start, min(END_WINDOW, source.nbytes - start)))
        # A signature counts where a whole record can follow.
        stop = min(len(window), source.nbytes - END_NBYTES - start + len(END_SIGNATURE))
        at = window.rfind(END_SIGNATURE, 0, max(0, stop))
        if at >= 0:
            return start + at
        # The next window would begin before the file does: that is an error of its own, though the file has more bytes.
        if start < END_WINDOW - 3 or source.nbytes - start >= COMMENT_REACH:
            return None
        start -= END_WINDOW - 3


def shortened(items, most=4):
    """Items in a row, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
