"""Tell what a source is from its bytes, never from its name: a kind of checkpoint, or a sentence about something else."""

import codecs
import re

from .. import _tar
from ..errors import FormatError
from ..importing import importing

ZIP, LEGACY, TAR = "zip", "legacy", "tar"

LOCAL_HEADER = b"PK\3\4"
EMPTY_ARCHIVE = b"PK\5\6"
# What stands before the first local header of an archive that was to be split: in parts, or in the end not at all.
SPLIT_MARKERS = (b"PK\7\10", b"PK00")

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a legacy stream is this number

# What to do with a folder of torch.distributed.checkpoint, or a file of it.
DCP_REMEDY = (
    "torch.distributed.checkpoint.format_utils.dcp_to_torch_save makes a checkpoint of the folder"
)

# The one key that an index of shards needs, and where its dict begins.
SHARD_INDEX = re.compile(r'"weight_map"\s*:\s*\{')

HEAD_NBYTES = 1024
# A data.pkl alone names its tensors' rebuild functions well within this.
PICKLE_LOOK = 64 << 10
# Scanned whole for zeros up to this size, a millisecond; looked at in places beyond.
ZEROS_LOOK = 16 << 20


def kind(source):
    """Tell the container of a checkpoint: "zip", "legacy" or "tar".

    Raises FormatError that says what the source looks like instead, and what to do with it. A damaged or unusual
    checkpoint is left to the reader of its kind.
    """
    head = bytes(source.read(0, min(source.nbytes, HEAD_NBYTES)))
    if is_archive(head):
        return ZIP
    if first_integer(head) == MAGIC:
        return LEGACY
    if is_tar(head):
        return TAR
    problem = foreign_format(head, source)
    if problem is None and ends_in_archive(source):
        return ZIP
    problem = problem or unknown(head, source)
    raise FormatError(f"{source.name}: {problem}", path=source.name, offset=0)


def is_archive(head):
    """Tell whether a ZIP archive begins here."""
    return head.startswith((LOCAL_HEADER, EMPTY_ARCHIVE)) or (
        head.startswith(SPLIT_MARKERS) and head[4:8] == LOCAL_HEADER
    )


def first_integer(head):
    """The integer that a pickle of any protocol consists of, or begins with; None if it is something else."""
    at = 0
    if head[:1] == b"\x80":
        at = 2
        if head[at : at + 1] == b"\x95":  # FRAME
            at += 9
    opcode, rest = head[at : at + 1], head[at + 1 :]
    if opcode == b"\x8a" and rest:  # LONG1
        return int.from_bytes(rest[1 : 1 + rest[0]], "little", signed=True)
    if opcode in (b"L", b"I"):
        digits, newline, _ = rest[:40].partition(b"\n")
        digits = digits.removesuffix(b"L")
        if newline and digits.isdigit():
            return int(digits)
    return None


def is_tar(head):
    """Tell whether a tar header stands first: one with the magic of ustar or GNU, or an older one that checks out."""
    if len(head) < _tar.BLOCK:
        return False
    return head[257:262] == b"ustar" or bool(_tar.header(head[: _tar.BLOCK]))


def ends_in_archive(source):
    """Tell whether a ZIP archive ends the source, with other bytes in front of it."""
    with importing:
        from ._zip_end import find_end

    try:
        end = find_end(source)[0]
        return end.entries > 0 and end.rival is None
    except FormatError:
        return False


# ---------------------------------------------------------------- formats that are known by their first bytes
SAFETENSORS = "safetensors.torch.load_file reads it"
UNPACK = "unpack it first, then load what was in it"

# (where, bytes, what it is, what to do), of what is to be unpacked before anything can be said of what is in it.
PACKED = (
    (0, b"\x1f\x8b", "gzip-compressed", "unpack it first, or pass gzip.open(path)"),
    (0, b"BZh", "bzip2-compressed", "unpack it first, or pass bz2.open(path)"),
    (0, b"\xfd7zXZ\0", "xz-compressed", "unpack it first, or pass lzma.open(path)"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed", UNPACK),
    (0, b"\x04\x22\x4d\x18", "lz4-compressed", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", UNPACK),
)
SIGNATURES = (
    *PACKED,
    (
        0,
        b"\x93FCKPTS\n",
        "a stream, as stream.dump writes it",
        "stream.load reads it, from the open file",
    ),
    (
        0,
        b"version https://git-lfs.github.com/spec/",
        "a git-lfs pointer in place of the file itself",
        "run 'git lfs pull'",
    ),
    (
        0,
        b"version https://hawser.github.com/spec/",
        "a git-lfs pointer in place of the file itself",
        "run 'git lfs pull'",
    ),
    (0, b"GGUF", "a GGUF model (llama.cpp)", "the gguf package reads it"),
    (0, b"lmgg", "a GGML model (old llama.cpp)", "llama.cpp converts it to GGUF"),
    (0, b"fmgg", "a GGML model (old llama.cpp)", "llama.cpp converts it to GGUF"),
    (0, b"tjgg", "a GGML model (old llama.cpp)", "llama.cpp converts it to GGUF"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, such as Keras weights", "h5py or keras reads it"),
    (0, b"\x93NUMPY", "a NumPy .npy array", "numpy.load reads it"),
    (0, b"PAR1", "a Parquet file", "pyarrow reads it"),
    (0, b"ARROW1", "an Arrow file", "pyarrow reads it"),
    (0, b"SQLite format 3\0", "an SQLite database", "sqlite3 reads it"),
    (0, b"%PDF-", "a PDF document", "look where it came from"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", "look where it came from"),
    (0, b"\xff\xd8\xff", "a JPEG image", "look where it came from"),
    (4, b"TFL3", "a TensorFlow Lite model", "the TensorFlow Lite interpreter reads it"),
    (4, b"PTMF", "a TorchScript model for mobile devices", "torch.jit.mobile loads it"),
    (4, b"ET12", "an ExecuTorch program", "its runtime loads it"),
)

# Formats that may have an archive behind them (a self-extracting program is an archive after all).
HOST_SIGNATURES = (
    (0, b"\x7fELF", "an ELF program or library", "look where it came from"),
    (0, b"MZ", "a Windows program", "look where it came from"),
)


def foreign_format(head, source):
    """A sentence about a format that its first bytes prove, or None."""
    if not source.nbytes:
        return "the file is empty (0 bytes); whatever should have been written to it was not: make or download it again"
    found = by_signature(head, SIGNATURES)
    if found:
        return found
    if head.startswith(b"\x80\2\x8a\r\n\x6c\xfc\x9c"):
        return f"a legacy checkpoint that is {TRANSLATED}"
    if head.startswith(b"\xef\xbf\xbd\2\xef\xbf\xbd\n"):
        return f"a legacy checkpoint that is {DECODED}"
    header_nbytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= header_nbytes <= source.nbytes - 8:
        return f"a file in the safetensors format, whatever its name says; {SAFETENSORS}"
    return pickle_problem(head, source) or onnx_problem(head)


def packing(head):
    """How bytes are packed, None where they are not."""
    return next((what for at, magic, what, _ in PACKED if head[at:].startswith(magic)), None)


def by_signature(head, signatures):
    for at, magic, what, remedy in signatures:
        if head[at : at + len(magic)] == magic:
            return f"this is {what}, not a checkpoint; {remedy}"
    return None


def pickle_problem(head, source):
    """A sentence about a bare pickle, or None. Protocols 0 and 1 have no mark of their own and are seen by their look."""
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        protocol = f"protocol {head[1]}"
    elif (
        head[:2] in (b"(d", b"(l", b"(i")
        or head[:12] == b"ccopy_reg\n_r"
        or head[:9] == b"ccollecti"
    ):
        protocol = "protocol 0"
    elif head[:2] in (b"}q", b"]q") or head[:3] == b"(cc":
        protocol = "protocol 1"
    else:
        return None
    look = bytes(source.read(0, min(source.nbytes, PICKLE_LOOK)))
    if b"joblib" in look:
        return f"a pickle ({protocol}) written by joblib, not a checkpoint; joblib.load reads it"
    if b"torch.distributed.checkpoint" in look:
        return f"the .metadata of a torch.distributed.checkpoint folder, not a checkpoint; {DCP_REMEDY}"
    if b"storage" in look and b"torch" in look and b"_load_from_bytes" not in look:
        return (
            f"a bare pickle ({protocol}) that refers to tensor storages: the data.pkl of an unpacked checkpoint; "
            f"the tensors lie in the files beside it, load the archive it came from"
        )
    return (
        f"a plain pickle ({protocol}), not a file written by torch.save; pickle.load reads it, "
        f"and runs whatever code is in it"
    )


def onnx_problem(head):
    """ONNX has no magic: a protobuf whose fields are an IR version and, next, a producer's name."""
    if head[:1] != b"\x08" or len(head) < 8 or head[2] not in (0x12, 0x3A, 0x42):
        return None
    if any(mark in head for mark in (b"pytorch", b"onnx", b"skl2", b"keras", b"tf2")):
        return "this is an ONNX model, not a checkpoint; onnx or onnxruntime reads it"
    return None


# ---------------------------------------------------------------- everything else
def unknown(head, source):
    """A sentence about bytes that are no format with a mark at its start."""
    found = by_signature(head, HOST_SIGNATURES)
    if found:
        return found
    if not any(head) and is_zero(source):
        return (
            f"the file is all zeros ({source.nbytes} bytes): it was allocated and never filled, as by a full disk "
            f"or a broken download; get it again"
        )
    text = as_text(head)
    if text is None:
        return f"not a checkpoint of a known kind: it begins with the bytes {head[:16].hex(' ')}"
    start = text.lstrip("\ufeff \t\r\n")
    beginning = f"it begins with {start[:60]!r}"
    lower = start[:200].lower()
    if lower.startswith(("<!doctype html", "<html", "<head", "<body")) or "<html" in lower:
        return f"this is an HTML page, not a checkpoint; open the link in a browser and download the file itself ({beginning})"
    if lower.startswith("<"):
        return f"this is XML text, not a checkpoint; often a server's error message ({beginning})"
    if lower.startswith("{") and SHARD_INDEX.search(start):
        return (
            "this is the index of a checkpoint in several files, not a checkpoint itself; its path is taken in place of one, where it "
            "ends in .index.json and the files lie beside it"
        )
    if lower.startswith(("{", "[")):
        return f"this is JSON text, not a checkpoint; often a server's error message ({beginning})"
    return f"this is plain text, not a checkpoint ({beginning})"


def as_text(head):
    """The head as text, None where it holds bytes that text does not."""
    encoding = "utf-16" if head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    # where the look ends, it may end inside a character
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        text = decoder.decode(head, final=len(head) < HEAD_NBYTES)
    except UnicodeDecodeError:
        return None
    odd = any(character < " " and character not in "\t\r\n\f\x1b" for character in text)
    return None if odd else text


def is_zero(source):
    """Tell whether there is nothing but zeros; in a large source, whether that is so wherever it is looked at."""
    step = 1 << 20
    if source.nbytes <= ZEROS_LOOK:
        places = range(0, source.nbytes, step)
    else:
        step, apart = 64 << 10, source.nbytes // 64
        places = [*range(0, source.nbytes - step, apart), source.nbytes - step]
    return not any(any(source.read(at, min(step, source.nbytes - at))) for at in places)


TRANSLATED = "damaged: line ends were translated to CR LF, as in a text-mode transfer; copy it again as binary"
DECODED = (
    "damaged: bytes were replaced by U+FFFD when it was decoded as text; copy it again as binary"
)


def text_damage(data):
    """What a transfer for text did to these bytes, or None."""
    if data.count(b"\xef\xbf\xbd") >= 4:
        return DECODED
    # In 64 KiB of weights some 250 bytes are line ends by chance, hardly ever all of them behind a CR.
    newlines = data.count(b"\n")
    return TRANSLATED if newlines > 1 and newlines == data.count(b"\r\n") else None
