"""Write pickles by hand: names of anything, calls of anything with any arguments, and persistent ids.

``craft(Call("torch Size", ((2, 3),)))`` needs no torch, and asks nobody whether such a call makes sense.
"""

import dataclasses
import struct
from typing import Any

from zipcraft import archive, checkpoint


class Name(str):
    """A class or function, "module name"."""


@dataclasses.dataclass(eq=False)
class Call:
    """An object made by calling a Name (or anything else); ``how`` is the opcode that makes it."""

    callee: Any
    args: Any = ()
    state: Any = None  # what BUILD gives it
    how: str = "REDUCE"
    kwargs: Any = None


@dataclasses.dataclass(eq=False)
class Pid:
    """A persistent id."""

    value: Any


@dataclasses.dataclass(eq=False)
class Raw:
    """Opcodes as they stand."""

    opcodes: bytes


def storage(kind, key, numel, location="cpu"):
    """The persistent id of a storage in a ZIP file."""
    return Pid(("storage", Name(kind if " " in kind else f"torch {kind}"), key, location, numel))


def craft(value):
    """A whole pickle."""
    return b"\x80\x02" + emit(value) + b"."


def emit(value):
    """The opcodes that push a value."""
    if isinstance(value, Name):
        return b"c" + "\n".join(value.split(" ")).encode() + b"\n"
    return EMITTERS[type(value)](value)


def emit_call(call):
    callee, args = emit(call.callee), emit(call.args)
    if call.how in ("INST", "OBJ"):
        members = b"".join(map(emit, call.args))
        made = b"(" + (
            members + b"i" + callee[1:] if call.how == "INST" else callee + members + b"o"
        )
    elif call.how == "NEWOBJ_EX":
        made = callee + args + emit(call.kwargs or {}) + b"\x92"
    else:
        made = callee + args + {"REDUCE": b"R", "NEWOBJ": b"\x81"}[call.how]
    return made if call.state is None else made + emit(call.state) + b"b"


def emit_int(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<I", len(data)) + data


def emit_text(value):
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def members(values):
    return b"(" + b"".join(map(emit, values))


EMITTERS = {
    Call: emit_call,
    Pid: lambda pid: emit(pid.value) + b"Q",
    Raw: lambda raw: raw.opcodes,
    type(None): lambda value: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: emit_int,
    float: lambda value: b"G" + struct.pack(">d", value),
    str: emit_text,
    bytes: lambda value: b"B" + struct.pack("<I", len(value)) + value,
    bytearray: lambda value: b"\x96" + struct.pack("<Q", len(value)) + value,
    tuple: lambda value: members(value) + b"t",
    list: lambda value: b"]" + members(value) + b"e",
    dict: lambda value: b"}" + members([x for pair in value.items() for x in pair]) + b"u",
    set: lambda value: b"\x8f" + members(value) + b"\x90",
    frozenset: lambda value: members(value) + b"\x91",
}


def torch_file(pickle, *storages):
    """A file that torch.load reads: a pickle, and the storages with keys "0", "1" and so on."""
    return archive(checkpoint(storages, **{"data.pkl": pickle}))
