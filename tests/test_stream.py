"""Streams of all formats, over everything that a stream can run through."""

import collections
import io
import os
import pickle
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import fastckpt
from fastckpt import stream
from fastckpt.stream import native
from fastckpt.stream.layout import GROUP_NBYTES
from objects import saved
from picklecraft import Call, Name, craft
from support import TORCH, alarms, same

FORMATS = list(stream.FORMATS)
each_format = pytest.mark.parametrize("format", FORMATS)


def dumped(obj, **options):
    f = io.BytesIO()
    stream.dump(obj, f, **options)
    return f.getvalue()


def shared():
    base = torch.arange(24.0)
    return {"base": base, "view": base[4:10].view(2, 3), "twice": [base, base]}


class Settings:
    def __init__(self, rate):
        self.rate = rate


OBJECTS = {
    "nothing": lambda: {},
    "no_tensors": lambda: {"a": 1, "b": [None, 2.5, "x"]},
    "one_tensor": lambda: torch.arange(5, dtype=torch.int16),
    "state_dict": lambda: dict(torch.nn.Linear(3, 4).state_dict()),
    "empty_tensors": lambda: [torch.empty(0), torch.ones(2), torch.empty(3, 0, dtype=torch.int8)],
    "nested": lambda: {"a": [torch.ones(3), (torch.zeros(2, 2), {"b": torch.eye(2)})], "n": 7},
    "strides": lambda: [torch.arange(12).view(3, 4).t(), torch.ones(1).expand(2, 2)],
    "odd_sizes": lambda: [torch.full((n,), 3, dtype=torch.uint8) for n in (1, 63, 64, 65, 129)],
    "groups": lambda: [torch.full((n,), n % 251, dtype=torch.uint8) for n in BOUNDARIES],
    "dtypes": lambda: [torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.bool, torch.complex64)],
    "many": lambda: {f"layer{i}": torch.full((i % 40,), i) for i in range(1500)},
}  # fmt: skip
BOUNDARIES = [GROUP_NBYTES - 64, 64, GROUP_NBYTES, GROUP_NBYTES - 1, 1, GROUP_NBYTES + 1, 5]

# What the format of leaves cannot say.
RICH_OBJECTS = {
    "shared": shared,
    "metadata": lambda: torch.nn.Linear(3, 4).state_dict(),
    "parameters": lambda: {"w": torch.nn.Parameter(torch.ones(2)), "g": torch.ones(1).requires_grad_()},
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "storages": lambda: [torch.arange(3.0).storage(), torch.ones(2).untyped_storage()],
    "meta": lambda: torch.empty(3, device="meta"),
    "float8": lambda: torch.ones(3).to(torch.float8_e5m2),
}  # fmt: skip


@each_format
@pytest.mark.parametrize("name", OBJECTS)
def test_round_trip(name, format):
    obj = OBJECTS[name]()
    same(obj, stream.load(io.BytesIO(dumped(obj, format=format))))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("format", ["native", "torch"])
@pytest.mark.parametrize("name", RICH_OBJECTS)
def test_round_trip_of_what_torch_save_takes(name, format):
    obj = RICH_OBJECTS[name]()
    found = stream.load(io.BytesIO(dumped(obj, format=format)))
    same(fastckpt.load(saved(obj)), found)


@pytest.mark.parametrize("name", RICH_OBJECTS)
def test_leaves_are_strided_tensors_on_their_own(name):
    obj = RICH_OBJECTS[name]()
    if name in ("shared", "metadata", "parameters", "float8"):
        found = stream.load(io.BytesIO(dumped(obj, format="pytree")))
        values = torch.utils._pytree.tree_leaves(found)
        for expected, actual in zip(torch.utils._pytree.tree_leaves(obj), values, strict=True):
            assert torch.equal(expected.detach(), actual)
    else:
        with pytest.raises((fastckpt.UnsupportedError, pickle.PicklingError, NotImplementedError)):
            dumped([obj], format="pytree")


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ([1, torch.nn.Linear(1, 1)], "leaf 1 is a Linear that holds a tensor, which this format"),
        ([Settings(torch.ones(1))], "leaf 0 is a Settings that holds a tensor"),
        ([Settings([torch.ones(1).storage()])], "leaf 0 is a Settings that holds a tensor"),
        ({torch.ones(1): 2}, "the keys or the context of a container hold a tensor"),
    ],
    ids=["module", "object", "storage", "key"],
)
def test_leaves_that_hold_tensors(obj, words):
    with pytest.raises(fastckpt.UnsupportedError, match=words):
        dumped(obj, format="pytree")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@each_format
def test_pickle_protocols(format, protocol):
    obj = OBJECTS["nested"]()
    same(obj, stream.load(io.BytesIO(dumped(obj, format=format, pickle_protocol=protocol))))


# Through what


def pipe(wrap):
    def ends():
        reading, writing = os.pipe()
        return wrap(reading, "rb"), wrap(writing, "wb")

    return ends


def descriptor(fd, mode):
    return fd


def raw(fd, mode):
    return open(fd, mode, buffering=0)


def non_blocking(fd, mode):
    os.set_blocking(fd, False)
    return fd


def buffered_non_blocking(fd, mode):
    return open(non_blocking(fd, mode), mode)


def sockets(wrap, timeout=None):
    def ends():
        pair = socket.socketpair()
        for each in pair:
            each.settimeout(timeout)
        return wrap(pair[0], "rb"), wrap(pair[1], "wb")

    return ends


def file_of(sock, mode, **options):
    f = sock.makefile(mode, **options)
    sock.close()  # when the file is
    return f


def tls(timeout):
    """Two ends of TLS, with a cipher that needs no certificate."""

    def ends():
        contexts = {}
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            contexts[protocol] = context = ssl.SSLContext(protocol)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
        client, server = contexts.values()
        here, there = socket.socketpair()
        accepted = []
        thread = threading.Thread(
            target=lambda: accepted.append(server.wrap_socket(there, server_side=True))
        )
        thread.start()
        pair = [client.wrap_socket(here)]
        thread.join()
        pair += accepted
        for each in pair:
            each.settimeout(timeout)
        return pair

    return ends


class Wrapped(socket.socket):
    """A socket that does more than receive: as TLS does, it must be asked, not passed over."""

    def recv_into(self, view, *args):
        received = super().recv_into(view, min(len(view), 1000))
        view[:received] = bytes(255 - byte for byte in view[:received])
        return received

    def sendall(self, data):
        super().sendall(bytes(255 - byte for byte in bytes(data)))

    def fileno(self):
        raise AssertionError("nobody has to ask for it")


ENDS = {
    "pipe": pipe(descriptor),
    "pipe_raw": pipe(raw),
    "pipe_buffered": pipe(open),
    "pipe_non_blocking": pipe(non_blocking),
    "pipe_raw_non_blocking": pipe(lambda fd, mode: raw(non_blocking(fd, mode), mode)),
    "pipe_buffered_non_blocking": pipe(buffered_non_blocking),
    "socket": sockets(lambda sock, mode: sock),
    "socket_timeout": sockets(lambda sock, mode: sock, timeout=10),
    "socket_non_blocking": sockets(lambda sock, mode: sock, timeout=0),
    "socket_file": sockets(lambda sock, mode: file_of(sock, mode)),
    "socket_file_raw": sockets(lambda sock, mode: file_of(sock, mode, buffering=0)),
    "tls": tls(timeout=None),
    "tls_non_blocking": tls(timeout=0),
    "socket_wrapped": sockets(lambda sock, mode: Wrapped(fileno=sock.detach())),
}


def close(f):
    os.close(f) if isinstance(f, int) else f.close()


def sending(f, *objects, **options):
    """A thread that sends objects and then closes its end."""

    def body():
        for obj in objects:
            stream.dump(obj, f, **options)
        close(f)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


@each_format
@pytest.mark.parametrize("kind", ENDS)
def test_two_objects_one_behind_the_other(kind, format):
    reading, writing = ENDS[kind]()
    first, second = OBJECTS["odd_sizes"](), {"big": torch.arange(300_000), "small": torch.ones(2)}
    thread = sending(writing, first, second, format=format)
    same(first, stream.load(reading))
    found = dict(stream.iter(reading))
    same(second, {name: found[name] for name in second})
    with pytest.raises(EOFError, match="at byte 0, in its first bytes; the other side has closed"):
        stream.load(reading)
    thread.join()
    close(reading)


class Stutter(io.RawIOBase):
    """Gives and takes some bytes at a time, and now and then has nothing to say."""

    def __init__(self, data=b""):
        self.data, self.calls = io.BytesIO(data), 0
        self.null = open(os.devnull, "wb")  # noqa: SIM115  which always takes something

    def close(self):
        self.null.close()
        super().close()

    def readable(self):
        return True

    def fileno(self):
        return self.null.fileno()

    def _some(self, n):
        self.calls += 1
        return None if self.calls % 3 == 0 else min(n, 1 + self.calls % 7 * 11)

    def readinto(self, view):
        n = self._some(len(view))
        return n and self.data.readinto(memoryview(view)[:n])

    def write(self, data):
        n = self._some(len(data))
        return n and self.data.write(memoryview(data)[:n])


class Mute(Stutter):
    fileno = io.RawIOBase.fileno


class ReadOnly:
    """An object of somebody's own, with read and nothing else; it gives less than it is asked for."""

    def __init__(self, data):
        self.data = io.BytesIO(data)

    def read(self, n):
        return self.data.read(min(n, 700))


@each_format
def test_objects_that_give_and_take_less(format):
    obj = [*OBJECTS["odd_sizes"](), torch.arange(20_000)]
    data = dumped(obj, format=format)
    same(obj, stream.load(ReadOnly(data)))
    stutter = Stutter()
    stream.dump(obj, stutter, format=format)
    assert stutter.data.getvalue() == data
    stutter = Stutter(data)
    # It has something again as soon as one can read from this.
    stutter.pipe, other = os.pipe()
    os.write(other, b".")
    same(obj, stream.load(stutter))
    os.close(stutter.pipe)
    os.close(other)
    with pytest.raises(BlockingIOError, match="no descriptor to wait for"):
        stream.load(Mute(data))


@each_format
def test_no_byte_too_many_is_read(format):
    obj = OBJECTS["many"]()
    data = dumped(obj, format=format)
    for f in (io.BytesIO(data + b"tail"), io.BufferedReader(io.BytesIO(data + b"tail"))):
        same(obj, stream.load(f))
        assert f.read() == b"tail"


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 70, 2**31 - 1])
def test_numbers_that_are_no_descriptors(number):
    for call in (lambda: stream.load(number), lambda: stream.dump(torch.ones(2), number)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_a_file_by_its_descriptor(tmp_path):
    obj = OBJECTS["nested"]()
    with open(tmp_path / "state", "w+b", buffering=0) as f:
        stream.dump(obj, f)
        stream.dump(obj, f, format="torch")
        nbytes = f.tell()
        f.write(b"tail")
        f.seek(0)
        same(obj, stream.load(f.fileno()))
        same(obj, stream.load(f))
        assert f.tell() == nbytes


@pytest.mark.parametrize(
    ("f", "words"),
    [("path.pt", r"open the path first"), (None, "is a NoneType"), (True, "is a bool"), (object(), "object")],
    ids=["path", "None", "bool", "object"],
)  # fmt: skip
def test_what_is_no_stream(f, words):
    for call in (lambda: stream.load(f), lambda: stream.dump({}, f), lambda: stream.iter(f)):
        with pytest.raises(TypeError, match=words):
            call()


def test_text_mode():
    with pytest.raises(TypeError, match="text mode"):
        stream.load(io.StringIO("text"))


# Waiting


def let_the_system_wait(here):
    """So that a blocking call ends by itself, as one that never blocks does."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        here.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 50_000))


@pytest.mark.parametrize("where", ["first_bytes", "storages"])
@pytest.mark.parametrize("whose", ["socket's", "system's"])
def test_timeout_of_a_socket(where, whose):
    here, there = socket.socketpair()
    if whose == "socket's":
        here.settimeout(0.05)
    else:
        let_the_system_wait(here)
    if where == "storages":
        there.sendall(dumped(torch.ones(1000))[:-100])
    with pytest.raises(TimeoutError, match="timed out"):
        stream.load(here)
    with pytest.raises(TimeoutError, match="timed out"):
        stream.dump(torch.ones(1 << 20), here)
    here.close()
    there.close()


@pytest.mark.parametrize("kind", ["pipe", "socket", "pipe_non_blocking"])
def test_signals_interrupt_and_do_not_break(kind):
    reading, writing = ENDS[kind]()
    obj, seen = {"x": torch.arange(400_000)}, []
    data = dumped(obj)
    send = writing.sendall if kind == "socket" else lambda part: os.write(writing, part)

    def body():
        for at in range(0, len(data), 1 << 20):
            time.sleep(0.02)
            part = data[at : at + (1 << 20)]
            while part:
                try:
                    part = part[send(part) or len(part) :]
                except BlockingIOError:
                    time.sleep(0.001)

    thread = threading.Thread(target=body)
    try:
        with alarms(lambda *_: seen.append(1), 0.002, 0.002):
            thread.start()
            same(obj, stream.load(reading))
    finally:
        thread.join()
    close(reading)
    close(writing)
    assert seen


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("way", ["in", "out"])
def test_one_signal_ends_a_wait(way, kind):
    """On the way out the wait begins in the middle of a write, which a signal cuts short and does not refuse."""
    reading, writing = ENDS[kind]()
    data = dumped(torch.ones(1000))[:2000]
    writing.sendall(data) if kind == "socket" else os.write(writing, data)
    with alarms(signal.default_int_handler, 0.05), pytest.raises(KeyboardInterrupt):
        stream.load(reading) if way == "in" else stream.dump(torch.ones(1 << 20), writing)
    close(reading)
    close(writing)


def test_nobody_listens():
    here, there = socket.socketpair()
    there.close()
    with pytest.raises(BrokenPipeError):
        stream.dump(torch.ones(10), here)
    here.close()


# iter


def test_a_tensor_is_there_before_the_next_is_sent():
    reading, writing = os.pipe()
    obj = {f"w{i}": torch.full((GROUP_NBYTES // 4,), float(i)) for i in range(4)}
    data, sent = dumped(obj), 0
    block = GROUP_NBYTES + 64  # a storage and the sums of its group
    step = len(data) - 4 * block
    thread_done = threading.Event()

    def body():
        nonlocal sent
        for size in (step, block, block, block, block):
            os.write(writing, data[sent : sent + size])
            sent += size
            assert arrived.acquire(timeout=300)
        thread_done.set()

    arrived = threading.Semaphore(0)
    thread = threading.Thread(target=body)
    thread.start()
    items = stream.iter(reading)
    arrived.release()
    for i, (name, tensor) in enumerate(items):
        assert name == f"w{i}"
        assert torch.equal(tensor, obj[name])
        assert sent <= step + (i + 1) * block
        arrived.release()
    thread.join()
    assert thread_done.is_set()
    os.close(reading)
    os.close(writing)


@each_format
def test_names(format):
    obj = {
        "a": {"b": torch.ones(1)},
        "l": [torch.zeros(2), {"c": torch.ones(3)}],
        "a.b": torch.ones(4),
        "n": 3,
    }
    found = dict(stream.iter(io.BytesIO(dumped(obj, format=format))))
    assert {name: len(tensor) for name, tensor in found.items()} == {
        ("a", "b"): 1, "l.0": 2, "l.1.c": 3, ("a.b",): 4,
    }  # fmt: skip
    assert dict(stream.iter(io.BytesIO(dumped(torch.ones(2), format=format)))).keys() == {""}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", [*OBJECTS, *RICH_OBJECTS])
def test_iter_gives_what_load_gives(name):
    obj = (OBJECTS | RICH_OBJECTS)[name]()
    data = dumped(obj)
    with fastckpt.open(saved(obj)) as checkpoint:
        expected = {name: checkpoint[name].read() for name in checkpoint}
        found = dict(stream.iter(io.BytesIO(data)))
        for name in expected:
            same(expected[name], found.pop(name), memo=None)
        assert not found


def test_shared_storages_are_shared_when_they_are_iterated_over():
    found = dict(stream.iter(io.BytesIO(dumped(shared()))))
    pointers = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert len(found) == 4
    assert len(pointers) == 1


# Memory

PEAKS = """
import torch
from fastckpt import stream

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

def of(call):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is what it has now
    before = peak()
    call()
    print(peak() - before)

def iterate():
    for name, tensor in stream.iter(0):
        del tensor

stream.load(0)
out = {f"w{i}": torch.zeros(4 << 20) for i in range(4)}
stream.load(0, {"w0": torch.zeros(1)})
of(lambda: stream.load(0))
of(lambda: stream.load(0, out))
of(iterate)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs /proc")
def test_nothing_is_there_twice():
    obj, small = {f"w{i}": torch.ones(4 << 20) for i in range(4)}, {"w0": torch.ones(1)}
    with subprocess.Popen(
        [sys.executable, "-c", PEAKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        for each in (small, small, obj, obj, obj):
            stream.dump(each, process.stdin)
        process.stdin.close()
        loaded, filled, iterated = map(float, process.stdout.read().split())
    assert loaded < 64 + 16
    assert filled < 16
    assert iterated < 16 + 16


# Formats of others


needs_streaming = pytest.mark.skipif(TORCH < (2, 7), reason="this torch has no streams")


@needs_streaming
@pytest.mark.parametrize("name", OBJECTS)
def test_torch_reads_and_writes_the_same(name):
    from torch.distributed._serialization import _streaming_load, _streaming_save

    obj = OBJECTS[name]()
    theirs = io.BytesIO()
    _streaming_save(obj, theirs)
    same(obj, stream.load(io.BytesIO(theirs.getvalue() + b"tail")))
    with warnings.catch_warnings(action="ignore"):
        same(obj, _streaming_load(io.BytesIO(dumped(obj, format="torch"))))


class TensorMetadata:
    """As a peer has it in its own module."""

    def __init__(self, nbytes, dtype, storage_offset, size, stride):
        self.nbytes, self.dtype = nbytes, dtype
        self.storage_offset, self.size, self.stride = storage_offset, size, stride


def peer_writes(obj):
    """What a peer sends that pickles its own classes."""
    leaves, treespec = torch.utils._pytree.tree_flatten(obj)
    storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    leaves = [
        TensorMetadata(
            leaf.untyped_storage().nbytes(), leaf.dtype, leaf.storage_offset(), leaf.size(), leaf.stride()
        ) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]  # fmt: skip
    data = pickle.dumps((leaves, treespec))
    parts = [bytes(memoryview(np.asarray(s.tolist(), dtype=np.uint8))) for s in storages]
    return len(data).to_bytes(8, "little") + data + b"".join(parts)


class PeersUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name == "TensorMetadata":
            assert module == "__main__"
            return TensorMetadata
        return super().find_class(module, name)


def peer_reads(data):
    f = io.BytesIO(data)
    leaves, treespec = PeersUnpickler(
        io.BytesIO(f.read(int.from_bytes(f.read(8), "little")))
    ).load()
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, TensorMetadata):
            buffer = torch.frombuffer(bytearray(f.read(leaf.nbytes) + b"\0" * 16), dtype=leaf.dtype)
            leaves[i] = buffer.as_strided(leaf.size, leaf.stride, leaf.storage_offset)
    assert f.read() == b""
    return torch.utils._pytree.tree_unflatten(leaves, treespec)


PYTREES = {
    "dict": lambda: {"a": torch.arange(6).view(2, 3).t(), "n": 3, 5: "x", (1, "k"): torch.ones(1)},
    "ordered": lambda: collections.OrderedDict(b=torch.ones(2), a=[torch.zeros(1), None]),
    "default": lambda: collections.defaultdict(list, a=[torch.ones(2)]),
    "deque": lambda: collections.deque([torch.ones(2), 1], maxlen=3),
    "tuples": lambda: ((torch.ones(1), (torch.zeros(1),)), [], {}),
    "view": lambda: [torch.arange(100)[10:20]],
    "leaf": lambda: torch.ones(3),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", PYTREES)
def test_a_peer_with_classes_of_its_own(name):
    obj = PYTREES[name]()
    same(obj, stream.load(io.BytesIO(peer_writes(obj))))
    found = peer_reads(dumped(obj, format="pytree"))
    leaves = torch.utils._pytree.tree_leaves
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(obj)
    for expected, actual in zip(leaves(obj), leaves(found), strict=True):
        assert (
            torch.equal(expected, actual)
            if isinstance(expected, torch.Tensor)
            else expected == actual
        )


def test_treespecs_of_older_torch():
    spec, leaf = Name("torch.utils._pytree TreeSpec"), Name("torch.utils._pytree LeafSpec")
    leaf = Call(leaf, (), {"type": None, "context": None, "children_specs": []}, how="NEWOBJ")
    state = {
        "type": Name("__builtin__ dict"),
        "context": ["a", "b"],
        "children_specs": [leaf, leaf],
    }
    data = craft(([1, "x"], Call(spec, (), state, how="NEWOBJ")))
    assert stream.load(io.BytesIO(len(data).to_bytes(8, "little") + data)) == {"a": 1, "b": "x"}


# Arguments


def test_numpy():
    found = stream.load(io.BytesIO(dumped({"a": torch.arange(3), "n": 1})), framework="numpy")
    assert isinstance(found["a"], np.ndarray)
    assert found["a"].tolist() == [0, 1, 2]
    ((name, array),) = stream.iter(io.BytesIO(dumped({"a": torch.arange(3)})), framework="numpy")
    assert (name, type(array)) == ("a", np.ndarray)


def test_it_needs_no_import_of_its_own_and_no_torch():
    program = (
        "import sys, fastckpt\n"
        "print(fastckpt.stream.load(0, framework='numpy')['a'].tolist(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=dumped({"a": torch.arange(3)}), capture_output=True
    )
    assert done.stdout.decode() == "[0, 1, 2] False\n", done.stderr


def test_map_location():
    data = dumped({"a": torch.ones(3), "b": torch.ones(2)}) + b"tail"
    f = io.BytesIO(data)
    assert stream.load(f, map_location="meta")["a"].is_meta
    assert f.read() == b"tail"
    assert (
        stream.load(io.BytesIO(data), map_location=lambda storage, location: storage)["b"].sum()
        == 2
    )


@pytest.mark.parametrize("format", ["native", "torch"])
def test_objects_of_any_class(format):
    data = dumped({"s": Settings(3), "t": torch.ones(2)}, format=format)
    with pytest.raises(fastckpt.UnsafePickleError, match="Settings"):
        stream.load(io.BytesIO(data))
    found = stream.load(io.BytesIO(data + b"tail"), weights_only=False)
    assert found["s"].rate == 3
    assert torch.equal(found["t"], torch.ones(2))
    assert stream.load(io.BytesIO(data), unknown="opaque")["s"].state == {"rate": 3}
    assert [name for name, _ in stream.iter(io.BytesIO(data))] == ["t"]


def test_leaves_are_data_whatever_is_said():
    data = dumped([Settings(3), torch.ones(2)], format="pytree")
    with pytest.raises(fastckpt.UnsafePickleError, match="Settings"):
        stream.load(io.BytesIO(data), weights_only=False)


@each_format
def test_progress(format):
    told = []
    obj = {f"w{i}": torch.ones(1 << 18) for i in range(5)}
    data = dumped(obj, format=format, progress=lambda *args: told.append(args))
    assert told[-1][0] == told[-1][1] >= 5 << 20
    told.clear()
    stream.load(io.BytesIO(data), progress=lambda *args: told.append(args))
    assert told[-1][0] == told[-1][1] >= 5 << 20
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f: stream.dump({}, f, format="zip"), ValueError, "expected one of: native, torch, pytree"),
        (lambda f: stream.dump({}, f, pickle_protocol=1), ValueError, "2 to 5"),
        (lambda f: stream.load(f, framework="jax"), ValueError, "expected one of: torch, numpy"),
        (lambda f: stream.load(f, limits=3), TypeError, "a Limits is expected"),
        (lambda f: stream.load(f, pickle_module=pickle), TypeError, "weights_only=False"),
        (lambda f: stream.load(f, {}, framework="numpy"), TypeError, "have no say"),
        (lambda f: stream.dump({"f": lambda: 0}, f), pickle.PicklingError, "lambda"),
    ],
    ids=["format", "protocol", "framework", "limits", "pickle_module", "out_and_framework", "object"],
)  # fmt: skip
def test_what_cannot_be_honoured_costs_no_byte(call, error, words):
    f = io.BytesIO(b"12345678")
    with pytest.raises(error, match=words):
        call(f)
    assert (f.tell(), f.getvalue()) == (0, b"12345678")


def test_storages_that_have_to_be_made(monkeypatch):
    """As those of other devices are: in pieces, between others that are in memory."""
    from fastckpt import blocks, describing

    describe = describing.describe

    def staged(obj, protocol):
        found = describe(obj, protocol)
        for number in range(1, len(obj), 2):
            storage = obj[number].untyped_storage()
            found.blocks[number] = blocks.Block(storage, obj[number].dtype)
            found.address[number] = 0
        return found

    obj = [torch.arange(n) for n in (3, 1000, 0, 5, 300_000, 70_000)]
    expected = dumped(obj)
    monkeypatch.setattr(describing, "describe", staged)
    monkeypatch.setattr(blocks, "STAGE_NBYTES", 64 << 10)
    for format in ("native", "torch"):
        same(obj, stream.load(io.BytesIO(dumped(obj, format=format))))
    assert dumped(obj) == expected


@pytest.mark.parametrize("format", ["native", "torch"])
def test_big_endian(format, monkeypatch):
    obj = {
        "a": torch.arange(5, dtype=torch.int32),
        "b": torch.tensor([1 + 2j]),
        "c": torch.ones(2).half(),
    }
    swapped = {
        name: torch.from_numpy(t.numpy().byteswap().view(t.numpy().dtype))
        for name, t in obj.items()
    }
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        data = dumped(swapped, format=format, crc32=False)
    same(obj, stream.load(io.BytesIO(data)))
    found = dict(stream.iter(io.BytesIO(data)))
    same(obj, {name: found[name] for name in obj})
    out = {name: torch.zeros_like(t) for name, t in obj.items()}
    stream.load(io.BytesIO(data), out)
    same(obj, out)


CLASS = b"c__main__\nX\n)\x81"
LONG_TO_WRITE_OUT = {
    "own_state": CLASS + b"q\xf0h\xf0b",
    "chain": CLASS + (b"q\xf0" + CLASS + b"h\xf0b") * 600,
}
FRAMES = {
    "native": lambda pickled: native.head_of(pickled, [], True),
    "torch": lambda pickled: pickled,
    "pytree": lambda pickled: struct.pack("<q", len(pickled)) + pickled,
    "pytree_leaves": lambda pickled: FRAMES["pytree"](pickled[:-1] + b"]\x86."),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("value", LONG_TO_WRITE_OUT)
def test_objects_that_never_end_are_refused_in_few_words(value, frame):
    data = FRAMES[frame](b"\x80\x02" + LONG_TO_WRITE_OUT[value] + b".")
    with pytest.raises(fastckpt.CheckpointError) as raised:
        stream.load(io.BytesIO(data), torch.zeros(1) if frame == "native" else None)
    assert len(str(raised.value)) < 500


@each_format
def test_the_environment_trusts_no_sender(format, monkeypatch, tmp_path):
    """torch's variable is about files."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "ran"
    pickled = (
        b"\x80\x02cos\nmkdir\nX"
        + struct.pack("<I", len(str(marker)))
        + str(marker).encode()
        + b"\x85R."
    )
    with pytest.raises(fastckpt.CheckpointError):
        stream.load(io.BytesIO(FRAMES[format](pickled)))
    assert not marker.exists()


def test_a_socket_that_is_closed_meanwhile(tmp_path):
    """Whatever file gets its number: nothing is written into that."""
    here, there = socket.socketpair()
    number, victims = here.fileno(), []

    def replace(done, total, name):
        if not victims:
            here.close()
            victims.append(os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT))

    received = threading.Thread(
        target=lambda: [None for _ in iter(lambda: there.recv(1 << 20), b"")]
    )
    received.start()
    try:
        with pytest.raises(OSError, match="closed meanwhile"):
            stream.dump(torch.zeros(20 << 20), here, progress=replace)
        assert victims == [number]
        assert os.fstat(number).st_size == 0
    finally:
        received.join(10)
        there.close()
        os.close(victims[0])


def test_a_socket_that_is_closed_while_the_head_goes_out():
    here, there = socket.socketpair()

    def receive():
        there.recv(1)
        here.close()
        while there.recv(1 << 20):
            pass

    receiver = threading.Thread(target=receive)
    receiver.start()
    with pytest.raises(OSError, match="closed meanwhile"):
        stream.dump({"text": "x" * (20 << 20)}, here)
    receiver.join(10)
    there.close()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_no_descriptor_is_left(kind):
    reading, writing = ENDS[kind]()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stream.dump({"x": torch.ones(10)}, writing)
        stream.load(reading)
        stream.dump({"x": torch.ones(10)}, writing)
        assert [name for name, _ in stream.iter(reading)] == ["x"]
        stream.dump({"x": torch.ones(10)}, writing)
        stream.iter(reading)  # and given up
        reading, writing = replaced(kind, reading, writing)
    assert len(os.listdir("/proc/self/fd")) == before
    close(reading)
    close(writing)


def replaced(kind, *ends):
    for end in ends:
        close(end)
    return ENDS[kind]()
