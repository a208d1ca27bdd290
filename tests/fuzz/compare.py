"""torch.load beside ours: where both read a file they agree, and where only torch does, our reason is a documented one."""

import re
import traceback
import warnings

import torch

import fastckpt
from fastckpt import FormatError, UnsafePickleError
from fastckpt._spec import TensorSpec
from fastckpt.rebuild import TABLE
from support import same

from . import ways
from .contract import LOADED, Finding, Outcome

# Why we refuse files that torch reads. Each is a row of docs/security.md: torch takes the same things on trust.
STRICTER = {
    "an archive that contradicts itself": r"end of ZIP archive|ZIP directory entry|two ZIP end records|two records of this name"
    r"|local header|overlap|something else begins|the directory calls it|a ZIP archive begins at byte|it is stored as it is",
    "content that is not what the directory says": r"CRC-32 is|deflated (data|bytes)|it inflates to",
    "storages of two sizes, or of none that a file can have": r"no file can hold|bytes in one place of the pickle"
    r"|an int is expected|the stream counts|bytes, the pickle says",
    "a key list that is not that of the object": r"list of storage keys|which the object never mentions",
    "tensors that reach out of their storage": r"reaches beyond its storage|it must lie between 0 and"
    r"|lies outside its buffer",
    "sparse tensors that contradict themselves": r"a sparse tensor contradicts itself|a tensor of indices has",
    "calls that no torch.save writes": r"is expected, the pickle has|may be named, but a call|a tensor's metadata is"
    r"|a string is expected|a tuple is expected|is not one that is known",
    "functions of torch's that stand in an object": r"the pickle names torch\.\S+, which is not known to be plain data",
    "attributes that torch.Tensor has itself": r"wants to set the attribute",
    "quantized dtypes without a quantizer": r"has no quantizer",
    "protocols of the future": r"pickle protocol [0-9]+; 0 to 5",
    "opcodes in front of the magic number": r"not a checkpoint of a known kind|a bare pickle",
}
# What verify does not look at: values, and what only making an object shows.
OF_VALUES = re.compile(
    r"a sparse tensor contradicts itself|makes none|lies outside its buffer|a tensor of type|a device is"
    r"|a tensor's attributes are|in the encoding asked for"
)
# Where verify need not be right about torch.load: what torch reads by chance, or out of memory that it has not written; counts that
# are right modulo 2^64; devices, and what a build of torch has or not. What only making a tensor shows comes on top.
NOT_FORETOLD = re.compile(
    r"it may read the wrong one|_rebuild_nested_tensor in a legacy stream|the stream counts -?[0-9]{17,}|CUDA|Invalid device string|device not recognized"
)
KNOWN = frozenset(".".join(key) for key in TABLE)


def two_dtypes(data):
    """Whether tensors of several dtypes lie in one storage of a file."""
    try:
        with fastckpt.open(data) as checkpoint:
            leaves = list(checkpoint.values())
    except fastckpt.CheckpointError:
        return False
    specs = [leaf.spec for leaf in leaves if isinstance(leaf.spec, TensorSpec)]
    return len({(spec.storage, spec.dtype) for spec in specs}) > len(
        {spec.storage for spec in specs}
    )


# Where two ways read a file and differ on purpose: why, the words for it, which way, and what such a file has in it.
LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the magic number of a legacy stream
DIFFERENT = (
    ("the name of a storage class is a note of torch's own", r"torch\.serialization\.StorageType", "torch.load", b""),
    ("torch gives all ids of a storage the dtype of the first", r"a storage of|\.dtype$", "torch.load", two_dtypes),
    ("torch swaps no bytes of dtypes without a storage class of their own", r"other bytes", "torch.load", b"big"),
    ("bytes in a pickle that is said to be of protocol 2 are text of Python 2", r"'str'> instead of <class 'bytes'", "salvage", b""),
    ("torch makes quantizers of a legacy stream before it has read what they are made of", r"\.(scales|zero_points)", "torch.load", LEGACY),
    ("a NaN in a set equals nothing, nor does a storage", r"\bnan\b|TypedStorage", "", b""),
)  # fmt: skip
STRICTER_PATTERN = re.compile("|".join(STRICTER.values()))


def torch_load(path):
    """What torch makes of a file, an Outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Outcome(torch.load(path, weights_only=True), LOADED)
        except Exception as error:
            return Outcome(None, type(error).__name__, error)


def compared(theirs, ours, data):
    """How torch.load and ours stand to each other over a file, and what is wrong about it: (word, findings)."""
    if theirs.status != LOADED:
        return ("ours alone" if ours.status == LOADED else "neither"), []
    if ours.status == LOADED:
        return "both", difference("torch.load", theirs.value, ours.value, data)
    if STRICTER_PATTERN.search(str(ours.error)):
        return "torch alone", []
    text = f"torch.load reads it: {ours.error}"
    return "torch alone", [Finding("stricter", "load", reason_of(ours.error), text)]


def foretold(report, theirs, load):
    """What verify says of torch.load, and what is wrong about it: (word, findings)."""
    taken = theirs.status == LOADED
    if report.torch_accepts is None:
        return "untold", []
    if report.torch_accepts == taken:
        return "right", []
    reasons = "; ".join(report.torch_reasons)
    if NOT_FORETOLD.search(reasons if taken else f"{theirs.status}: {theirs.error}"):
        return "excepted", []
    if not taken and (OF_VALUES.search(str(load.error)) or is_of_making(theirs.error)):
        return "excepted", []
    reason = reasons if taken else f"{theirs.status} {theirs.error}"
    text = f"torch.load: {theirs.status} {theirs.error}, {report}"
    return "wrong", [Finding("misforetold", "verify", reason_of(reason), text)]


def is_of_making(error):
    """Whether torch raised an error while it made a tensor."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name.startswith("_rebuild") for frame in frames)


def disagreement(way, outcome, load):
    """Findings where one of our ways says of a file what ``load`` does not."""
    name, loads = way.__name__, load.status == LOADED
    text = f"load: {load.status} {load.error}, {name}: {outcome.status} {outcome.error}"
    whole = way in ways.SAME or way in ways.WRITERS and outcome.value is not None
    if loads and outcome.status == LOADED and whole:
        return difference(name, load.value, outcome.value)
    if (
        way in ways.REPORTS
        and outcome.value
        and outcome.value.ok
        and is_overlooked(name, load.error)
    ):
        return [Finding("disagrees", name, reason_of(load.error), text)]
    if way not in ways.SAME or outcome.status == load.status:
        return []
    # What is mapped is not verified; and which of two things that are wrong with a record comes first may differ.
    mapped = name == "load_mapped" and load.status == "ChecksumError"
    if mapped or {outcome.status, load.status} == {"ChecksumError", "FormatError"}:
        return []
    return [Finding("disagrees", name, f"{load.status} {outcome.status}", text)]


def is_overlooked(report, error):
    """Whether a report that found nothing should have foreseen an error of ``load``."""
    if (
        report == "scan"
    ):  # names; that one cannot be called, or only called, is nothing that it says
        unsafe = isinstance(error, UnsafePickleError) and "not known to be" in str(error)
        return unsafe and error.qualname not in KNOWN
    return isinstance(error, FormatError) and not OF_VALUES.search(str(error))


def difference(way, expected, actual, data=b""):
    """A finding where two objects are not the same; ``data`` is the file, where one of them is torch's."""
    try:
        same(expected, actual)
    except AssertionError as error:
        found = str(error)
        for _, words, only, mark in DIFFERENT:
            is_so = mark if callable(mark) else lambda data, mark=mark: mark in data
            if re.search(words, found) and only in way and is_so(data):
                return []
        text = f"load and {way} give different objects: {found}"
        return [Finding("differs", way, reason_of(found), text)]
    except (RuntimeError, RecursionError, TypeError, NotImplementedError, KeyError):
        pass  # what torch cannot look at, what nests too deep to be compared, keys that equal nothing
    return []


def reason_of(error):
    """What an error says, without names and numbers."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[.*?\]|0x[0-9a-f]+|[0-9]+|<.*?>|\(.*?\)", "_", str(error))
    return re.sub(r"^.*?\.pt: ", "", text)[:90]
