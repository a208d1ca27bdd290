"""A state dict from one process to another, through a pipe and through the loopback of TCP.

What is measured is the whole way, from the wish of the receiver to its tensors: sending, too.
"""

import io
import multiprocessing
import os
import socket
import warnings

from .common import LARGE_MB, TENSOR_MB, Fresh, touch_memory

SMALL_KB = 64
TENSORS = {
    f"of {TENSOR_MB} MB": (LARGE_MB // TENSOR_MB, TENSOR_MB << 20),
    f"of {SMALL_KB} KB": (2 * LARGE_MB * 1024 // SMALL_KB, SMALL_KB << 10),
}
LENGTH_NBYTES = 8


# ---- writers: each a pair of functions of an object and a file, or of a file


def torch_save():
    """torch.load seeks, so that it needs the whole before it begins, and somebody has to say how long that is."""
    import torch

    def send(obj, f):
        buffer = io.BytesIO()
        torch.save(obj, buffer)
        f.write(buffer.tell().to_bytes(LENGTH_NBYTES, "little"))
        f.write(buffer.getbuffer())
        f.flush()

    def receive(f):
        nbytes = int.from_bytes(f.read(LENGTH_NBYTES), "little")
        return torch.load(io.BytesIO(f.read(nbytes)))

    return send, receive


def torch_stream():
    try:
        from torch.distributed import _serialization
    except ImportError:
        raise NotImplementedError("this torch has no streams") from None

    def send(obj, f):
        _serialization._streaming_save(obj, f)
        f.flush()

    warnings.filterwarnings("ignore", "The given buffer is not writable")
    return send, _serialization._streaming_load


def fastckpt_stream(format):
    def make():
        from fastckpt import stream

        def send(obj, f):
            stream.dump(obj, f.fileno(), format=format)

        return send, lambda f: stream.load(f.fileno())

    return make


WRITERS = {
    "torch.save": torch_save,
    "torch's stream": torch_stream,
    "fastckpt": fastckpt_stream("native"),
    "fastckpt, torch's stream": fastckpt_stream("torch"),
    "fastckpt, pytree": fastckpt_stream("pytree"),
}


# ---- channels: each gives a file to read and one to write


def pipe():
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


def loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here = server.accept()[0]
    with here, there:  # until the files are closed
        return here.makefile("rb"), there.makefile("wb")


CHANNELS = {"pipe": pipe, "TCP": loopback}


class Stream(Fresh):
    """The receiver is the process that is measured, in which nothing was received before but one small tensor."""

    params = [list(WRITERS), list(TENSORS), list(CHANNELS)]
    param_names = ["writer", "tensors", "channel"]
    sender = None

    def setup(self, folder, writer, tensors, channel):
        import torch

        count, nbytes = TENSORS[tensors]
        send, receive = WRITERS[writer]()
        objects = [
            {"weight": torch.ones(4)},
            {f"layer{i}.weight": torch.randn(nbytes >> 2) for i in range(count)},
        ]
        self.asked, ask = os.pipe()
        reading, writing = CHANNELS[channel]()
        self.files = [reading, writing, os.fdopen(ask, "wb", buffering=0)]
        self.sender = multiprocessing.get_context("fork").Process(
            target=serve, args=(self.asked, objects, send, writing), daemon=True
        )
        self.sender.start()

        def call():
            self.files[2].write(b".")
            return receive(reading)

        self.prepare(call)
        call()
        del objects
        touch_memory(count * nbytes + (count * nbytes // 8))

    def time_stream(self, folder, writer, tensors, channel):
        self.measure()

    def teardown(self, *_):
        super().teardown()
        self.call = None  # whose files these are
        if self.sender is not None:
            for f in self.files:
                f.close()
            os.close(self.asked)
            self.sender.join(10)
            self.sender.kill()  # where it was never asked
            self.sender = None


def serve(asked, objects, send, f):
    """The other process: send one object after the other, each when it is asked for."""
    for obj in objects:
        os.read(asked, 1)
        send(obj, f)
