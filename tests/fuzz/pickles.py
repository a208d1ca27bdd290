"""Change pickles opcode by opcode, so that most of what comes out still runs some way."""

import itertools
import pickletools
import struct

from fastckpt.rebuild import TABLE
from picklecraft import Call, Name, emit, emit_int, emit_text, storage

from .numbers import masked, near

MARKER = "escaped"  # what a payload makes in the current folder
PAYLOADS = (
    Call(Name("os mkdir"), (MARKER,)),
    Call(Name("posix system"), (f"mkdir {MARKER}",)),
    Call(Name("builtins eval"), (f"open({MARKER!r}, 'w')",)),
    Call(Name("builtins exec"), (f"open({MARKER!r}, 'w')",)),
    Call(Name("io open"), (MARKER, "w")),
    Call(Name("subprocess Popen"), (["mkdir", MARKER],)),
    Call(Name("importlib import_module"), ("antigravity",)),
    Call(Name("builtins __import__"), ("antigravity",)),
    Call(Name("numpy save"), (MARKER, 1)),
    Call(Name("torch save"), (1, MARKER)),
    Call(Name("torch.storage _load_from_bytes"), (b"x",)),
    Call(Name("pathlib Path.touch"), (Call(Name("pathlib Path"), (MARKER,)),)),
    Call(Name("functools partial"), (Name("os mkdir"), MARKER)),
    Call(Name("copyreg __newobj__"), (Name("io FileIO"), MARKER, "w")),
    Call(Name("fuzz.no.such.module thing"), (), {"a": 1}),
)

KNOWN_NAMES = tuple(" ".join(key) for key in TABLE)
OTHER_NAMES = (
    "os system", "posix mkdir", "builtins eval", "builtins getattr", "builtins object", "builtins print", "torch.nn Module",
    "torch load", "torch.jit load", "numpy load", "numpy fromfile", "numpy memmap", "x Y", "copyreg _extension_registry",
    "torch._utils _rebuild_tensor_v4", "torch Tensor.numpy", "collections OrderedDict.fromkeys", "encodings.idna x", " ",
)  # fmt: skip
TEXTS = (
    "", "0", "1", "data", "storage", "module", "cpu", "cuda:0", "meta", "mps", "cuda:99", "latin1", "rot13", "zlib", "idna", "utf-16",
    "torch.strided", "torch.sparse_coo", "__class__", "__dict__", "__reduce__", "keys", "items", "copy", "data.pkl", "../x", "a\0b",
    "\ud800", "é" * 40, "f4", "<f8", "O", "V8", "M8[ns]", "U99999", "C", "F", "K", "little", "-1", "007", "1e9", "nan",
)  # fmt: skip
NUMBERS = frozenset(b"KMJIL\x8a\x8b")
STRINGS = frozenset(b"XUTCB\x8c\x8d\x8e\x96V")
PUSHES = NUMBERS | frozenset(b"NGX\x8c\x88\x89)]}UC")  # one object each, out of nothing
VALUES = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 0.0, 1.5, float("nan"), float("inf"), "", "a", "0", "cpu", b"", b"ab",
    bytearray(b"x"), (), (1,), (2, 3), [], [1], {}, {"a": 1}, {1: "b"}, set(), {1}, frozenset(), frozenset({1, 2}), Name("torch float32"),
    Name("x Y"), Name("torch FloatStorage"), Name("collections OrderedDict"), Name("builtins int"), Call(Name("torch Size"), ((2,),)),
)  # fmt: skip
# Where a length stands in front of bytes: opcode -> bytes of the length.
LENGTHS = dict(zip(b"XUTCB\x8c\x8d\x8e\x96\x8a\x8b\x95", (4, 1, 4, 1, 4, 1, 8, 8, 8, 1, 4, 8), strict=True))  # fmt: skip
ATOMS = (
    *(bytes([code]) for code in b"()}]NQR0123tlduseaobc.\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98"),
    b"K\0", b"K\1", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\0" * 8 + b"\1", b"G\x7f\xf8\0\0\0\0\0\0",
    b"G\x7f\xf0\0\0\0\0\0\0", b"F1e400\n", b"I01\n", b"L12L\n", b"h\0", b"h\1", b"q\0", b"q\1", b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\xff",
    b"p99999999\n", b"\x82\1", b"\x80\5", b"\x80\6", b"\x95" + b"\xff" * 8, b"\x8b\0\0\0\0", b"B\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8,
    b"S'a\\x00'\n", b"Vabc\\u0041\n", b"P0\n", b"(K\1K\2t", b"ccollections\nOrderedDict\n)R", b"cbuiltins\nset\n",
)  # fmt: skip


def split(data):
    """The opcodes of the pickle that ``data`` begins with, each with its argument; ValueError where there is none."""
    places = [at for _, _, at in pickletools.genops(data)]
    return [data[a:b] for a, b in itertools.pairwise([*places, places[-1] + 1])]


def mutate(rng, data, others):
    """Another pickle, made from this one (and parts of the others), and a word for what was done."""
    try:
        ops = split(data)
    except Exception:  # whatever pickletools makes of bytes that are no pickle
        return flip(rng, data), "flip"
    name = rng.choice(MUTATIONS_BY_WEIGHT)
    return b"".join(MUTATIONS[name](rng, ops, others) or ops), name


def flip(rng, data):
    """Change some bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if out else 0):
        at = rng.randrange(len(out))
        out[at] = rng.choice((out[at] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255))
    return bytes(out)


def pick(rng, ops, codes):
    """Where an opcode of some kind stands; None if nowhere."""
    places = [i for i, op in enumerate(ops) if op[0] in codes]
    return rng.choice(places) if places else None


def change_number(rng, ops, others):
    if (i := pick(rng, ops, NUMBERS)) is not None:
        value = near(rng, next(pickletools.genops(ops[i] + b"."))[1])
        ops[i] = emit_int(value) if rng.random() < 0.9 else b"I%d\n" % value


def change_bytes(rng, ops, others):
    i = rng.randrange(len(ops))
    ops[i] = flip(rng, ops[i])


def change_opcode(rng, ops, others):
    i = rng.randrange(len(ops))
    ops[i] = rng.choice(ATOMS)[:1] + ops[i][1:]


def change_length(rng, ops, others):
    """A length that is not that of the bytes behind it."""
    if (i := pick(rng, ops, LENGTHS)) is not None:
        nbytes = LENGTHS[ops[i][0]]
        length = int.from_bytes(ops[i][1 : 1 + nbytes], "little")
        ops[i] = ops[i][:1] + masked(near(rng, length), nbytes) + ops[i][1 + nbytes :]


def change_text(rng, ops, others):
    if (i := pick(rng, ops, STRINGS)) is not None:
        if rng.random() < 0.6:
            ops[i] = emit_text(rng.choice(TEXTS))
        else:
            ops[i] = ops[pick(rng, ops, STRINGS)]  # one that stands elsewhere


def change_name(rng, ops, others):
    if (i := pick(rng, ops, b"ci")) is not None:
        name = rng.choice(KNOWN_NAMES if rng.random() < 0.75 else OTHER_NAMES)
        ops[i] = ops[i][:1] + emit(Name(name))[1:]


def remove(rng, ops, others):
    at = rng.randrange(len(ops))
    del ops[at : at + rng.choice((1, 1, 2, 5))]


def repeat(rng, ops, others):
    at = rng.randrange(len(ops))
    run = ops[at : at + rng.choice((1, 1, 3, 20))]
    ops[at:at] = run * rng.choice((1, 1, 2, 50))


def swap(rng, ops, others):
    a, b = rng.randrange(len(ops)), rng.randrange(len(ops))
    ops[a], ops[b] = ops[b], ops[a]


def insert(rng, ops, others):
    at = rng.randrange(len(ops))
    ops[at:at] = [rng.choice(ATOMS) for _ in range(rng.choice((1, 1, 2, 4)))]


def splice(rng, ops, others):
    """A run of opcodes out of another pickle."""
    try:
        theirs = split(rng.choice(others))
    except Exception:
        return
    a, at = rng.randrange(len(theirs)), rng.randrange(len(ops))
    n = rng.choice((1, 4, 16, len(theirs)))
    ops[at : at + rng.choice((0, n))] = theirs[a : a + n]


def cut(rng, ops, others):
    del ops[rng.randrange(len(ops)) :]


def change_value(rng, ops, others):
    """A plain value becomes one of another kind."""
    replace_value(rng, ops, emit(rng.choice(VALUES)))


def payload(rng, ops, others):
    """A call that would be seen if it ran."""
    replace_value(rng, ops, emit(rng.choice(PAYLOADS)))


def bomb(rng, ops, others):
    """Work that doubles with every opcode, where it is hashed or not."""
    doubled = b"K\1" + rng.choice((b"2\x86", b"(2\x91\x86")) * rng.choice((16, 200))
    replace_value(
        rng,
        ops,
        rng.choice(
            (
                doubled,
                b"}" + doubled + b"Ns",
                b"\x8f(" + doubled + b"\x90",
                b"(" + doubled + b"\x91",
            )
        ),
    )


def known_call(rng, ops, others):
    """A known function, called with a few plain things or with those that stand elsewhere."""
    args = rng.choice(
        (
            (),
            (1,),
            (b"abc",),
            ([1, 2],),
            ("a", None),
            ((2, 3), 0.5),
            ({"a": 1},),
            tuple(rng.sample(VALUES, 3)),
        )
    )
    call = emit(Name(rng.choice(KNOWN_NAMES))) + emit(args) + rng.choice((b"R", b"R", b"\x81"))
    replace_value(rng, ops, call + rng.choice((b"", b"", emit({"a": 1}) + b"b")))


def known_id(rng, ops, others):
    """A persistent id, of a storage that may be there."""
    kind = rng.choice(
        (
            "FloatStorage",
            "ByteStorage",
            "ComplexFloatStorage",
            "QInt8Storage",
            "torch.storage UntypedStorage",
        )
    )
    numel = rng.choice((0, 1, 4, 6, 12, near(rng, 4)))
    replace_value(rng, ops, emit(storage(kind, rng.choice("0123"), numel)))


def replace_value(rng, ops, opcodes):
    """Put opcodes that push one object in the place of one that does; or, where there is room for them, behind it."""
    if (i := pick(rng, ops, PUSHES)) is not None:
        ops[i] = opcodes if rng.random() < 0.7 else ops[i] + opcodes + b"0"


def refer(rng, ops, others):
    """A memo entry fetched or stored under another number."""
    if (i := pick(rng, ops, b"hq")) is not None:
        ops[i] = ops[i][:1] + bytes([rng.randrange(max(2, min(256, len(ops))))])
    elif (i := pick(rng, ops, b"jr")) is not None:
        ops[i] = ops[i][:1] + struct.pack("<I", rng.randrange(len(ops)))


MUTATIONS = {
    f.__name__: f
    for f in (
        change_number, change_bytes, change_opcode, change_length, change_text, change_name, remove, repeat, swap, insert,
        splice, cut, change_value, payload, bomb, known_call, known_id, refer,
    )
}  # fmt: skip
WEIGHTS = {
    "change_number": 8,
    "change_text": 4,
    "change_value": 5,
    "known_call": 3,
    "payload": 2,
    "change_name": 4,
    "change_bytes": 3,
    "splice": 3,
    "insert": 3,
    "refer": 3,
}
MUTATIONS_BY_WEIGHT = [name for name in MUTATIONS for _ in range(WEIGHTS.get(name, 1) + 1)]
