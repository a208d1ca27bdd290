"""Whether torch.load(weights_only=True) takes a file, by the rules of torch 2.13 without anything that was allowed to it.

What is asked is what torch checks, which is less than what is right: it looks at no CRC-32. Where devices are is left out.
"""

import re

from ._stack import opcodes_of
from ._zip import HEADER, OK
from .containers._zip_end import COMMENT_REACH
from .containers.zip import (
    BYTEORDER_RECORD,
    LOCAL_NBYTES,
    NEWEST_VERSION,
    OLDEST_VERSION,
    PICKLE,
    TORCHSCRIPT_RECORD,
    VERSION_RECORDS,
    RecordNames,
    folded,
    parse_version,
)
from .dtypes import CODE_BY_STORAGE, DTYPES, QUANTIZED, SUB_BYTE_NAMES
from .records import DEFLATED, STORED
from .torch_rows import QSCHEMES

OPCODES = b".(\x80c\x81Rbaesut\x85\x86\x87)]}\x8fN\x88\x89JKM\x8aGXUQhjqr"  # all of protocol 2 that state dicts need
# Names of Python 2 modules stand for those of today.
PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}
REBUILD = """parameter parameter_with_state qtensor tensor tensor_v2 tensor_v3 sparse_tensor meta_tensor_no_storage nested_tensor
    wrapper_subclass device_tensor_from_numpy device_tensor_from_cpu_tensor""".split()
# torch writes them, and fails to read them: it has no bytes yet where it wants to look at some.
LEGACY_REFUSED = {"torch.storage.UntypedStorage", "torch._utils._rebuild_nested_tensor"}
# Where torch can put a storage: on its own devices, and on those that others are known to add to it.
LOCATION = re.compile(
    r"cpu|meta|mps.*|(cuda|xpu|hpu|mtia|xla|privateuseone|npu|mlu|musa)((:|[0-9]).*)?", re.DOTALL
)
ALIGNMENT_RECORD = ".storage_alignment"
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
    if others := sorted(set(opcodes_of(data)) - set(OPCODES)):
        yield f"the pickle has opcodes that are not allowed: {', '.join(f'{op:#04x}' for op in others)}"
    locations = {spec.location for spec in unpickled.storages}
    if nowhere := sorted(each for each in locations if not LOCATION.fullmatch(each)):
        yield f"storages are tagged with devices that are not known: {shortened([repr(each[:40]) for each in nowhere])}"
    if unpickled.undecodable is not None:
        yield f"the pickle has a Python 2 string that is not UTF-8: {unpickled.undecodable[:40]!r}"


def stream_reasons(contents):
    """Why torch refuses a legacy stream or a tar, whose object is read."""
    if contents.kind == "tar":
        yield "weights_only=True refuses every tar checkpoint"
    names = {each.qualname for each in contents.unpickled.names}
    elsewhere = {name for name, _ in contents.unpickled.unknown} - names - ALLOWED
    if elsewhere:
        yield f"a pickle before or behind that of the object names {shortened(sorted(elsewhere))}"
    for name in LEGACY_REFUSED & names:
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
    if unpickled is not None:
        roots = {spec.key: spec for spec in unpickled.storages}
        problems = [
            problem for spec in roots.values() if (problem := archive.storage_problem(spec))
        ]
        if problems:
            yield shortened(problems, 1)


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

    def container_reasons(self):
        survey, columns, records = self.survey, self.survey.columns, self.survey.records
        if bytes(self.source.read(0, 4)) != b"PK\3\4":
            yield "the file does not begin with a record (50 4b 03 04)"
        if survey.end.at < self.source.nbytes - COMMENT_REACH or survey.end.bias:
            yield "the end of the archive is not where torch looks for it"
        if len(survey.all_names) < survey.end.entries or (survey.entry_status != OK).any():
            yield "the directory of the archive is damaged"
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
        foreign = [name for name in self.names if not name.startswith(self.root)]
        if foreign:
            yield f"not all records are in the folder {self.root!r}: {shortened(foreign)}"

    def small_record_reasons(self):
        if self.row(TORCHSCRIPT_RECORD) is not None:
            yield "it is a TorchScript archive, which torch.jit.load reads"
        if problem := self.problem(PICKLE):
            yield problem
        names = [name for name in VERSION_RECORDS if self.row(name) is not None]
        for name in (*names[:1], BYTEORDER_RECORD, ALIGNMENT_RECORD):
            if self.row(name) in self.survey.marked:
                yield self.problem(name)
        text = self.content(names[0]) if names else None
        version = None if text is None else parse_version(text)
        if version is None or not OLDEST_VERSION <= version <= NEWEST_VERSION:
            found = "no version record" if text is None else f"the version {text[:20]!r}"
            yield f"it has {found}; {OLDEST_VERSION} to {NEWEST_VERSION} are known"
        text = self.content(BYTEORDER_RECORD)
        if text not in (None, b"little", b"big"):
            yield f"its byte order is {text[:20]!r}"
        text = self.content(ALIGNMENT_RECORD)
        if text is not None:
            try:
                int(text)
            except ValueError:
                yield f"its storage alignment is {text[:20]!r}, which is no number"

    def row(self, name):
        return self.rows.get(folded(self.root + name))

    def content(self, name):
        row = self.row(name)
        content = None if row is None else self.survey.read(row)
        return None if content is None else bytes(content)

    def problem(self, name):
        """Why a record cannot be read, None where it can."""
        row = self.row(name)
        if row is None:
            return f"record {name!r} is missing"
        records, i = self.survey.records, self.local_row.get(row)
        local = self.survey.local
        if i is None or not local.present[i]:
            return f"record {name!r} has no local header"
        if records.stored_nbytes[row] > self.source.nbytes - local.data[i]:
            return f"record {name!r} reaches over the end of the file"
        if self.survey.flags[row] & UNREADABLE or records.method[row] not in (STORED, DEFLATED):
            return f"record {name!r} is encrypted, or compressed in a way that torch cannot read"
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


def shortened(items, most=4):
    """Items in a row, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
