"""What a load consists of, piece by piece: the pickle machine, checksums, importing."""

import pickle
import time
import zlib
from io import BytesIO

import numpy as np

from .common import Repeated, path_of


class Parse(Repeated):
    """The pickle of many small tensors, from bytes that are in memory to objects that stand for tensors."""

    params = [["fastckpt", "C pickle that makes nothing"]]
    param_names = ["machine"]

    def setup(self, folder, machine):
        from fastckpt.contents import open_contents
        from fastckpt.source import open_source

        if self.call is None:
            source = open_source(path_of(folder, "many", "zip"))
            contents = open_contents(source)
            source.close()
            parse = contents.unpickle_again
            if machine != "fastckpt":
                data = contents.pickle_bytes()
                parse = lambda: Hollow(BytesIO(data)).load()  # noqa: E731
            self.prepare(parse)
        self.prepare(self.call)

    def time_parse(self, folder, machine):
        self.measure()


class Hollow(pickle.Unpickler):
    """The floor for any unpickler: Python's own in C, with nothing behind the names."""

    def find_class(self, module, name):
        return nothing

    def persistent_load(self, pid):
        return None


def nothing(*_):
    return None


class Checksum:
    """CRC-32 by each kernel, over bytes that are in the L2 cache and over bytes that are not."""

    params = [["zlib", "portable", "pclmul", "vpclmul", "armv8"], ["256 KiB", "64 MiB"]]
    param_names = ["kernel", "buffer"]

    def setup(self, kernel, buffer):
        from fastckpt import _crc32

        if kernel != "zlib" and kernel not in _crc32.kernels():
            raise NotImplementedError(f"this CPU does not run {kernel}")
        self.data = np.ones((64 << 20) if buffer == "64 MiB" else (256 << 10), np.uint8)
        self.sum = zlib.crc32 if kernel == "zlib" else lambda data: _crc32.crc32(data, 0, kernel)

    def track_crc32(self, kernel, buffer):
        """The best of many."""
        best, end = float("inf"), time.perf_counter() + 0.3
        while (start := time.perf_counter()) < end:
            self.sum(self.data)
            best = min(best, time.perf_counter() - start)
        return self.data.nbytes / best / 1e9

    track_crc32.unit = "GB/s"


class Importing:
    """Until ``load`` can be called; torch is imported by whoever uses it."""

    number = 1
    repeat = 5
    rounds = 1
    warmup_time = 0
    params = [["numpy", "fastckpt.load", "torch"]]
    param_names = ["module"]

    def timeraw_import(self, module):
        package = module.partition(".")[0]
        return f"import {package}; {module}"
