"""Streams that are cut, damaged, or sent by somebody who means no good."""

import io
import os

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import stream
from fastckpt._crc32 import crc32
from fastckpt.memory import machine_nbytes
from fastckpt.stream.native import HEADER, head_of
from objects import saved
from picklecraft import Call, Name, Raw, craft, emit, storage

ITEMS = [
    ("w", torch.arange(20, dtype=torch.int16)),
    ("b", torch.ones(3)),
    ("e", torch.empty(0)),
    ("c", torch.zeros(70, dtype=torch.uint8)),
]
OBJ = dict(ITEMS)


def dumped(obj, **options):
    f = io.BytesIO()
    stream.dump(obj, f, **options)
    return f.getvalue()


def load(data, out=None, **options):
    return stream.load(io.BytesIO(data), out, **options)


def equal(found):
    return found.keys() == OBJ.keys() and all(torch.equal(found[name], OBJ[name]) for name in OBJ)


class Exact(io.RawIOBase):
    """Gives what there is; one that asks on behind the end is told so."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def readinto(self, view):
        part = self.data[self.at : self.at + len(view)]
        view[: len(part)] = part
        self.at += len(part)
        return len(part)


@pytest.mark.parametrize("format", stream.FORMATS)
@pytest.mark.parametrize("out", [False, True], ids=["new", "out"])
def test_every_truncation(format, out):
    data = dumped(OBJ, format=format)
    for n in range(len(data)):
        target = {name: torch.zeros_like(tensor) for name, tensor in ITEMS} if out else None
        with pytest.raises(fastckpt.FormatError, match=rf"ends at byte {n}, in ") as caught:
            stream.load(Exact(data[:n]), target)
        assert caught.value.offset == n
        assert isinstance(caught.value, EOFError) == (n == 0)
    assert equal(stream.load(Exact(data)))


@pytest.mark.parametrize("format", stream.FORMATS)
def test_a_pipe_that_ends(format):
    data = dumped(OBJ, format=format)
    for n in (0, 7, len(data) // 2, len(data) - 1):
        reading, writing = os.pipe()
        os.write(writing, data[:n])
        os.close(writing)
        with pytest.raises(fastckpt.FormatError, match=rf"ends at byte {n}, in "):
            stream.load(reading)
        os.close(reading)


def test_where_it_ends_is_said():
    data = dumped(OBJ)
    for behind, words in (
        (1, "the sums of a group"),
        (64 + 1, "record '3'"),
        (64 + 128 + 1, "record '1'"),
    ):
        with pytest.raises(fastckpt.FormatError, match=words):
            load(data[:-behind])
    with pytest.raises(fastckpt.FormatError, match="the table of sizes"):
        load(data[:70])


@pytest.mark.parametrize("format", stream.FORMATS)
def test_iter_gives_what_had_arrived(format):
    big = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(3)}
    data = dumped(big, format=format)
    items = stream.iter(io.BytesIO(data[:-2000]))
    for i in range(2):
        name, tensor = next(items)
        assert torch.equal(tensor, big[f"w{i}"]), name
    with pytest.raises(fastckpt.FormatError, match=r"in record '(data/)?2'"):
        next(items)


@pytest.mark.parametrize("bit", [0, 6])
def test_every_flip_is_noticed(bit):
    data = dumped(OBJ)
    unnoticed = []
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        try:
            found = load(bytes(flipped))
        except fastckpt.CheckpointError:
            continue
        assert equal(found)
        unnoticed.append(at)
    # Nothing but zeros that fill up.
    assert all(data[at] == 0 for at in unnoticed)
    assert unnoticed
    assert min(unnoticed) > HEADER.itemsize


@pytest.mark.filterwarnings("ignore:tensors tagged:UserWarning")
@pytest.mark.parametrize("format", ["torch", "pytree"])
def test_flips_where_there_are_no_sums(format):
    data = dumped(OBJ, format=format)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 4
        try:
            load(bytes(flipped))
        except fastckpt.CheckpointError:
            pass


def test_checksums_say_where():
    data = bytearray(dumped(OBJ))
    at = data.rindex(OBJ["b"].numpy().tobytes())
    data[at] ^= 1
    with pytest.raises(
        fastckpt.ChecksumError, match=rf"record '1' at byte {at}: CRC-32 is"
    ) as caught:
        load(bytes(data))
    assert caught.value.record == "1"
    assert caught.value.actual != caught.value.expected
    data[at] ^= 1
    data[64 + 8] ^= 1
    with pytest.raises(fastckpt.ChecksumError, match="CRC-32 of the table of sizes"):
        load(bytes(data))


def test_without_sums():
    data = bytearray(dumped(OBJ, crc32=False))
    assert len(data) == len(dumped(OBJ)) - 64
    assert equal(load(bytes(data)))
    data[-130] ^= 1
    load(bytes(data))


# A peer that lies


def native(pickled, nbytes, **header):
    """A head of our own format, with fields of its header changed, and its sum made right."""
    head = bytearray(head_of(pickled, nbytes, True))
    fields = np.frombuffer(head, dtype=HEADER)[0:1]
    for name, value in header.items():
        fields[name] = value
    fields["header_crc32"] = crc32(bytes(head[:60]))
    return bytes(head)


def entry(key, length, is_storage=False):
    name = Name("torch.distributed._serialization _Entry")
    state = {"key": key, "is_storage": is_storage, "length": length}
    return Call(name, (), state, how="NEWOBJ")


def leaves(tensors, treespec):
    data = craft((tensors, treespec))
    return len(data).to_bytes(8, "little") + data


LEAF = Call(Name("torch.utils._pytree LeafSpec"), (), [None, None, []], how="NEWOBJ")


def spec(kind, context, children):
    name = Name("torch.utils._pytree TreeSpec")
    return Call(name, (), [Name(kind) if kind else None, context, children], how="NEWOBJ")


def metadata(nbytes=8, dtype="torch float32", offset=0, size=(2,), stride=(1,)):
    state = {
        "nbytes": nbytes,
        "dtype": Name(dtype),
        "storage_offset": offset,
        "size": size,
        "stride": stride,
    }
    return Call(Name("__main__ TensorMetadata"), (), state, how="NEWOBJ")


def chain(depth, copies, bottom):
    """A list in a list and so on down, each ``copies`` times in the one around it."""
    opcodes = emit(bottom)
    for level in range(depth):
        # Remembered, popped, and fetched by the one around it
        put = b"r" + level.to_bytes(4, "little") + b"0"
        get = Raw(b"j" + level.to_bytes(4, "little"))
        opcodes += put + emit(spec("__builtin__ list", None, [get] * copies))
    return Raw(opcodes)


def tensor(numel):
    hooks = Call(Name("collections OrderedDict"))
    args = (storage("FloatStorage", "0", numel), 0, (numel,), (1,), False, hooks)
    return craft(Call(Name("torch._utils _rebuild_tensor_v2"), args))


TENSOR = tensor(2)
EVIL = craft(Call(Name("os system"), ("true",)))
ONE_TB = 1 << 40

HOSTILE = {
    # our own format
    "version": (native(TENSOR, [8], version=2), "version 2, and 1 is known"),
    "flags": (native(TENSOR, [8], flags=8), "asks for what is not known"),
    "reserved": (native(TENSOR, [8], reserved=b"x" * 16), "asks for what is not known"),
    "code": (native(EVIL, []), "os.system"),
    "pickle_of_1_TB": (native(TENSOR, [8], pickle_nbytes=ONE_TB), "the pickle would take 1099511627776 bytes"),
    "pickle_of_exabytes": (native(TENSOR, [8], pickle_nbytes=(1 << 64) - 1), "the pickle would take"),
    "records_without_end": (native(TENSOR, [8], records=1 << 61), "sizes that cannot be"),
    "storage_of_1_TB": (native(tensor(ONE_TB // 4), [ONE_TB]), "this machine has memory for"),
    "negative_size": (native(TENSOR, [8, -8]), "do not add up"),
    "sizes_that_wrap": (native(TENSOR, [8, (1 << 63) - 1, 1], data_nbytes=8), "do not add up"),
    "wrong_total": (native(TENSOR, [8], data_nbytes=9), "do not add up"),
    "another_size": (native(TENSOR, [16]), "record '0' has 16 bytes, the pickle says 8"),
    "more_storages_than_names": (native(TENSOR, [8, 0]), "2 storages are to come, and the pickle names 1"),
    "no_such_storage": (native(TENSOR, []), "storage '0' is named by the pickle"),
    # torch's
    "no_table": (craft({}) + b"0000", "a table of records is expected"),
    "empty_table": (craft([]) + b"0000", "a table of records is expected"),
    "no_rows": (craft([1, 2]), "_Entry of a key and a length is expected"),
    "negative_length": (craft([entry("data.pkl", -1)]), "_Entry of a key and a length is expected"),
    "length_is_text": (craft([entry("data.pkl", "9")]), "_Entry of a key and a length is expected"),
    "key_twice": (craft([entry("data.pkl", 1), entry("data.pkl", 1)]), "twice"),
    "lengths_that_wrap": (craft([entry("data.pkl", 1), entry("x", 1 << 62), entry("y", 1)]) + b".", "sizes that cannot be"),
    "record_of_1_TB": (craft([entry("data.pkl", 1), entry("x", ONE_TB)]) + b".", "would take 1099511627776 bytes"),
    "no_data.pkl": (craft([entry("byteorder", 6), entry("data/0", 4)]) + b"little1234", "no record 'data.pkl'"),
    "byteorder": (
        craft([entry("data.pkl", len(TENSOR)), entry("byteorder", 3)]) + TENSOR + b"mid", "byteorder is 'mid'"),
    "code_in_table": (EVIL, "_Entry|table of records"),
    "code_in_data.pkl": (craft([entry("data.pkl", len(EVIL))]) + EVIL, "os.system"),
    "missing_storage": (craft([entry("data.pkl", len(TENSOR))]) + TENSOR, "storage '0' is named by the pickle"),
    "no_opcode": (b"\x80\x02]\xff" + b"\xff" * 20, "0xff is not a pickle opcode"),
    "legacy": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "a legacy checkpoint"),
    # leaves
    "no_pair": (b"\6\0\0\0\0\0\0\0" + craft([]), "\\(leaves, treespec\\) is expected"),
    "no_list": (leaves({}, LEAF), "the leaves are .*a list is expected"),
    "no_leaf": (leaves([], LEAF), "treespec has more"),
    "a_leaf_too_many": (leaves([1, 2], LEAF), "there are 2 leaves, and the treespec has 1"),
    "leaves_of_1_TB": ((ONE_TB).to_bytes(8, "little"), "the pickle would take"),
    "tensor_of_1_TB": (leaves([metadata(ONE_TB)], LEAF), "the storages would take"),
    "negative_nbytes": (leaves([metadata(-1)], LEAF), "a size and a plain dtype are expected"),
    "dtype": (leaves([metadata(dtype="torch qint8")], LEAF), "a size and a plain dtype are expected"),
    "one_tensor_twice": (leaves(Raw(b"](" + emit(metadata()) + b"q\x7fh\x7fe"), LEAF), "a tensor stands twice among the leaves"),
    "outside": (leaves([metadata(size=(3,))], LEAF), "reaches beyond its storage"),
    "negative_offset": (leaves([metadata(offset=-1)], LEAF), "storage offset is -1"),
    "no_stride": (leaves([metadata(stride=None)], LEAF), "tuples are expected"),
    "container": (leaves([1], spec("os system", None, [LEAF])), "os.system"),
    "class_of_a_leaf": (leaves([Call(Name("os system"), ("true",))], LEAF), "os.system"),
    "keys": (leaves([1], spec("__builtin__ dict", ["a", "b"], [LEAF])), "a list of as many plain keys"),
    "unhashable_key": (leaves([1], spec("__builtin__ dict", [[]], [LEAF])), "a list of as many plain keys"),
    "spec_is_none": (leaves([1], None), "a TreeSpec is expected"),
    "spec_without_state": (leaves([1], spec("__builtin__ list", None, 3)), "a type, a context and children"),
    "deep": (leaves([1], chain(5000, 1, LEAF)), "nests too deep"),
    "exponential": (leaves([], chain(60, 2, spec("__builtin__ list", None, []))), "out of proportion"),
    # neither
    "zeros": (bytes(100), "no stream of a known kind"),
    "zip": (saved({}), "a ZIP checkpoint of torch.save, not a stream"),
    "http": (b"HTTP/1.1 404 Not Found\r\n\r\n", "begins with b'HTTP/1.1'"),
    "gzip": (b"\x1f\x8b\x08" + b"\xff" * 20, "gzip-compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name, monkeypatch):
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("code was run"))
    data, words = HOSTILE[name]
    with pytest.raises(fastckpt.CheckpointError, match=words):
        load(data)
    with pytest.raises(fastckpt.CheckpointError):
        dict(stream.iter(io.BytesIO(data), unknown="error"))
    with pytest.raises((fastckpt.CheckpointError, RuntimeError)):  # which says that it does not fit
        load(data, torch.zeros(2))


def test_big_claims_cost_nothing_before_bytes_arrive():
    """Half the memory of the machine is announced, and none of it comes."""
    nbytes = machine_nbytes() // 2 & ~4095
    pickled = tensor(nbytes // 4)
    before = peak()
    with pytest.raises(fastckpt.FormatError, match="in record '0'"):
        load(native(pickled, [nbytes]) + bytes(1 << 20))
    assert peak() - before < 64
    with pytest.raises(fastckpt.FormatError, match="in the pickle"):
        load(native(b"", [], pickle_nbytes=nbytes) + bytes(1 << 20))
    assert peak() - before < 64


def peak():
    with open("/proc/self/status") as f:
        return int(f.read().split("VmHWM:")[1].split()[0]) / 1024


def test_limits():
    data = dumped(torch.ones(1000))
    assert load(data, limits=fastckpt.Limits(stream_nbytes=4000)).sum() == 1000
    with pytest.raises(
        fastckpt.LimitError,
        match=r"storages would take 4000 bytes, and Limits\.stream_nbytes allows 3999",
    ):
        load(data, limits=fastckpt.Limits(stream_nbytes=3999))
    # What is filled, or dropped, takes no memory.
    small = fastckpt.Limits(stream_nbytes=300)
    load(data, torch.zeros(1000), limits=small)
    assert load(data, map_location="meta", limits=small).is_meta


def test_a_table_that_never_ends_is_bounded():
    class Endless(io.RawIOBase):
        """A list, and None pushed and popped for ever."""

        begin = b"\x80\x02]" + b"0N" * 5

        def readinto(self, view):
            data, self.begin = self.begin[: len(view)], self.begin[len(view) :]
            data += b"N" * (len(view) - len(data))
            view[:] = data
            return len(view)

    with pytest.raises(fastckpt.LimitError, match="the table of records"):
        stream.load(Endless(), limits=fastckpt.Limits(stream_nbytes=10_000))
