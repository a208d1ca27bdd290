"""Write the inert object of a symbolic pickle as a pickle again: what is read of it is what the first one said.

Protocol 2 wherever the object allows it, one opcode for what took one, sharing and cycles as they were. Nesting of any
depth takes no recursion.
"""

import struct
from typing import NamedTuple

from ._spec import Global, StorageRef
from .errors import UnsupportedError
from .nodes import MISSING, Opaque, short

MARK, STOP, POP, POP_MARK = b"(", b".", b"0", b"1"
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"
TUPLES = (b")", b"\x85", b"\x86", b"\x87")  # of none to three members
CALLS = {"REDUCE": b"R", "NEWOBJ": b"\x81", "NEWOBJ_EX": b"\x92", "OBJ": b"o", "INST": b"o"}
FILLS = {"APPEND": b"e", "APPENDS": b"e", "SETITEM": b"u", "SETITEMS": b"u", "ADDITEMS": b"\x90"}
BATCH = 1000  # items between a MARK and the opcode that takes them, as Python's picklers have it
MEMO_BYTE = 256

_DONE = object()


class StorageId(NamedTuple):
    """What a persistent id says of a storage; ``cls`` is the name of its class in torch, ``numel`` counts items of that."""

    cls: str
    key: str
    location: str
    numel: int


def dump(root, storage_id, *, lost=frozenset(), python2=True):
    """The pickle of a symbolic object; ``storage_id(ref)`` gives the StorageId of a StorageRef.

    ``lost`` are ids of parts that are left out: None stands in their place in lists and tuples, entries of dicts and members of
    sets go with them. With ``python2`` bytes are strings of Python 2, which has no other, else bytes.
    Raises UnsupportedError for what a pickle of its own cannot say, such as entries of the extension registry.
    """
    writer = _Writer(storage_id, lost, python2)
    writer.run(root)
    protocol = bytes([4 if writer.is_new else 2])
    return b"\x80" + protocol + b"".join(writer.out) + STOP


class _Writer:
    """One pickle under way. ``memo`` holds the index of what was written, by id or, for text and names, by value."""

    def __init__(self, storage_id, lost, python2):
        self.storage_id, self.lost, self.python2 = storage_id, lost, python2
        self.out, self.memo, self.count = [], {}, 0
        self.is_new = False  # whether there are opcodes that protocol 2 lacks

    def run(self, root):
        """Write one value after the other; those with members yield them, and go on when each is written."""
        stack = [iter((root,))]
        while stack:
            value = next(stack[-1], _DONE)
            if value is _DONE:
                stack.pop()
            elif id(value) in self.lost:
                self.out.append(NONE)
            elif (members := self.begin(value)) is not None:
                stack.append(members)

    def begin(self, value):
        """Write a value that has no members, or return a generator that writes one that has."""
        if (known := self.memo.get(id(value))) is not None:
            return self.get(known)
        write = _WRITERS.get(type(value))
        if write is None:
            raise UnsupportedError(f"{short(value)} cannot be written to a pickle again")
        return write(self, value)

    def put(self, key):
        """Number what was just written, for ``key`` to be looked up by."""
        index = self.memo[key] = self.count
        self.count += 1
        self.out.append(
            b"q" + bytes([index]) if index < MEMO_BYTE else b"r" + index.to_bytes(4, "little")
        )

    def get(self, index):
        self.out.append(
            b"h" + bytes([index]) if index < MEMO_BYTE else b"j" + index.to_bytes(4, "little")
        )

    # -- values without members

    def none(self, value):
        self.out.append(NONE)

    def bool(self, value):
        self.out.append(TRUE if value else FALSE)

    def int(self, value):
        if 0 <= value < 1 << 8:
            self.out.append(b"K" + bytes([value]))
        elif 0 <= value < 1 << 16:
            self.out.append(b"M" + value.to_bytes(2, "little"))
        elif -(1 << 31) <= value < 1 << 31:
            self.out.append(b"J" + value.to_bytes(4, "little", signed=True))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            head = b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + length(data)
            self.out.append(head + data)

    def float(self, value):
        self.out.append(b"G" + struct.pack(">d", value))

    def text(self, value):
        if (known := self.memo.get(value)) is not None:
            return self.get(known)
        data = value.encode("utf-8", "surrogatepass")
        self.out.append(b"X" + length(data) + data)
        return self.put(value)

    def bytes(self, value):
        if self.python2:
            short_form, long_form = b"U", b"T"
        else:
            short_form, long_form, self.is_new = b"C", b"B", True
        is_short = len(value) < 256
        self.out.append(short_form + bytes([len(value)]) if is_short else long_form + length(value))
        self.out.append(value)
        self.put(id(value))

    def bytearray(self, value):
        self.is_new = True
        self.out.append(b"\x96" + len(value).to_bytes(8, "little") + value)
        self.put(id(value))

    def name(self, value):
        return self.write_name(value.module, value.name)

    def write_name(self, module, name):
        if (known := self.memo.get((module, name))) is not None:
            return self.get(known)
        text = f"{module}\n{name}\n"
        if text.count("\n") == 2:
            self.out.append(b"c" + text.encode("utf-8", "surrogatepass"))
        else:
            self.is_new = True
            self.text(module)
            self.text(name)
            self.out.append(b"\x93")  # STACK_GLOBAL
        return self.put((module, name))

    def storage(self, value):
        """A persistent id."""
        said = self.storage_id(value)
        self.out.append(MARK)
        self.text("storage")
        self.write_name("torch", said.cls)
        self.text(said.key)
        self.text(said.location)
        self.int(said.numel)
        self.out.append(b"t")
        self.put(("storage", id(value)))
        self.out.append(b"Q")

    # -- values with members: generators

    def tuple(self, value):
        if len(value) > 3:
            self.out.append(MARK)
        yield from value
        if (known := self.memo.get(id(value))) is not None and value:
            # A member led back to it, and wrote it meanwhile.
            self.out.append(POP_MARK if len(value) > 3 else POP * len(value))
            self.get(known)
            return
        self.out.append(TUPLES[len(value)] if len(value) < 4 else b"t")
        if value:
            self.put(id(value))

    def frozenset(self, value):
        self.is_new = True
        self.out.append(MARK)
        yield from self.kept(value)
        self.out.append(b"\x91")
        self.put(id(value))

    def list(self, value):
        self.out.append(b"]")
        self.put(id(value))
        yield from self.fill(value, b"a", b"e")

    def set(self, value):
        self.is_new = True
        self.out.append(b"\x8f")
        self.put(id(value))
        yield from self.fill(self.kept(value), None, b"\x90")

    def dict(self, value):
        self.out.append(b"}")
        self.put(id(value))
        yield from self.fill_pairs(value.items())

    def call(self, node):
        if node.callee is None:
            raise UnsupportedError(
                f"{short(node)} cannot be written again: the pickle refers to it by something that is not in it"
            )
        opcode = CALLS[node.opcode]
        on_stack = 2
        if opcode == b"o":
            self.out.append(MARK)
            yield node.callee
            yield from node.args
        else:
            yield node.callee
            yield node.args
            if opcode == b"\x92":
                self.is_new, on_stack = True, 3
                yield node.kwargs
        if (known := self.memo.get(id(node))) is not None:
            # Its own arguments led back to it, and wrote it meanwhile.
            self.out.append(POP_MARK if opcode == b"o" else POP * on_stack)
            self.get(known)
            return
        self.out.append(opcode)
        self.put(id(node))
        yield from self.fill(node.items, b"a", b"e")
        yield from self.fill_pairs(node.pairs.items())
        if node.state is not MISSING:
            yield node.state
            self.out.append(b"b")
        for change, values in node.later:
            yield from self.change(change, values)

    def change(self, opcode, values):
        """What is done to an object out of order."""
        if opcode == "BUILD":
            yield values
            self.out.append(b"b")
            return
        if opcode.startswith("SETITEM"):
            values = [
                part
                for pair in self.kept_pairs(zip(values[::2], values[1::2], strict=True))
                for part in pair
            ]
        self.is_new |= opcode == "ADDITEMS"
        self.out.append(MARK)
        yield from values
        self.out.append(FILLS[opcode])

    def fill(self, values, one, many):
        """Put values into the list or set that is on top of the stack."""
        values = list(values)
        for at in range(0, len(values), BATCH):
            batch = values[at : at + BATCH]
            alone = len(batch) == 1 and one is not None
            if not alone:
                self.out.append(MARK)
            yield from batch
            self.out.append(one if alone else many)

    def fill_pairs(self, pairs):
        flat = list(self.kept_pairs(pairs))
        for at in range(0, len(flat), BATCH):
            batch = flat[at : at + BATCH]
            if len(batch) > 1:
                self.out.append(MARK)
            for key, value in batch:
                yield key
                yield value
            self.out.append(b"u" if len(batch) > 1 else b"s")

    def kept(self, values):
        return [value for value in values if id(value) not in self.lost]

    def kept_pairs(self, pairs):
        return [
            pair for pair in pairs if not (id(pair[0]) in self.lost or id(pair[1]) in self.lost)
        ]


def length(data):
    return len(data).to_bytes(4, "little")


_WRITERS = {
    type(None): _Writer.none, bool: _Writer.bool, int: _Writer.int, float: _Writer.float, str: _Writer.text,
    bytes: _Writer.bytes, bytearray: _Writer.bytearray, Global: _Writer.name, StorageRef: _Writer.storage,
    tuple: _Writer.tuple, frozenset: _Writer.frozenset, list: _Writer.list, set: _Writer.set, dict: _Writer.dict,
    Opaque: _Writer.call,
}  # fmt: skip
