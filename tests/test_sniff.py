"""What a source is told to be, and the sentence about everything that is no checkpoint."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile

import numpy as np
import pytest

from fastckpt.containers.sniff import MAGIC, first_integer, kind
from fastckpt.errors import FormatError
from fastckpt.source import open_source
from zipcraft import archive, checkpoint

ZIP = archive(checkpoint())


def legacy(protocol):
    """The first pickles of a legacy stream."""
    return b"".join(pickle.dumps(value, protocol) for value in (MAGIC, 1001, {}, {}, []))


def tar(form, names=("storages", "tensors", "pickle")):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as packed:
        for name in names:
            packed.addfile(tarfile.TarInfo(name))
    return out.getvalue()


def without_magic(data):
    """The same tar as a tool before POSIX would have written it."""
    block = bytearray(data[:512])
    block[257:345] = bytes(88)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


KINDS = {
    "zip": (ZIP, "zip"),
    "zip, truncated": (ZIP[:100], "zip"),
    "zip without entries": (archive([]), "zip"),
    "zip behind a split marker": (b"PK\7\x08" + ZIP, "zip"),
    "zip behind another marker": (b"PK00" + ZIP, "zip"),
    "zip behind a script": (archive(checkpoint(), before=b"#!/bin/sh\n", counted=False), "zip"),
    "zip behind zeros": (archive(checkpoint(), before=bytes(5000)), "zip"),
    "zip behind a program": (archive(checkpoint(), before=b"\x7fELF" + bytes(99)), "zip"),
    **{f"legacy, protocol {p}": (legacy(p), "legacy") for p in range(6)},
    "legacy, first pickle only": (legacy(2)[:15], "legacy"),
    "legacy with a zip in its data": (legacy(2) + ZIP, "legacy"),
    "tar, ustar": (tar(tarfile.USTAR_FORMAT), "tar"),
    "tar, GNU": (tar(tarfile.GNU_FORMAT), "tar"),
    "tar, PAX": (tar(tarfile.PAX_FORMAT, ["п" * 200]), "tar"),
    "tar before POSIX": (without_magic(tar(tarfile.USTAR_FORMAT)), "tar"),
    "tar with a zip in it": (tar(tarfile.USTAR_FORMAT)[:1536] + ZIP, "tar"),
}


@pytest.mark.parametrize(("data", "expected"), KINDS.values(), ids=KINDS)
def test_kind(data, expected):
    assert kind(open_source(memoryview(data))) == expected


def saved(save, *arguments):
    out = io.BytesIO()
    save(out, *arguments)
    return out.getvalue()


SAFETENSORS = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
PERSISTENT = (
    b"\x80\x02}q\x00X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ."
)
HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"

SENTENCES = {
    "nothing": (b"", "empty"),
    "zeros": (bytes(10240), "all zeros .10240 bytes"),
    "zeros, large": (bytes(20 << 20), "all zeros"),
    "stream": (b"\x93FCKPTS\n" + bytes(56), r"a stream, as stream\.dump writes it.*stream\.load"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer.*git lfs pull"),
    "HTML": (HTML, "HTML page.*<!DOCTYPE html>"),
    "HTML behind blanks": (b"\n\n  " + HTML, "HTML page"),
    "XML": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML.*AccessDenied"),
    "JSON": (b'{"error": "not found"}', "JSON.*'{\"error\": \"not found\"}'"),
    "index of shards": (b'{"metadata": {},\n "weight_map": {"a": "b.bin"}}', "the index of a checkpoint in several files"),
    "text": (b"hello, world\n", "plain text.*hello, world"),
    "text, long": (b"lorem ipsum " * 1000, "plain text"),
    "text, UTF-8 across the look": ("ж".encode() * 5000, "plain text"),
    "text, UTF-16": ("hello".encode("utf-16"), "plain text.*hello"),
    "safetensors": (struct.pack("<Q", len(SAFETENSORS)) + SAFETENSORS + bytes(4), "safetensors"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(50), "GGUF"),
    "GGML": (b"lmgg" + bytes(50), "GGML"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(50), "HDF5"),
    "npy": (saved(np.save, np.zeros(3)), "numpy.load"),
    "ONNX": (b"\x08\x07\x12\x07pytorch\x1a\x052.0.0", "ONNX"),
    "gzip": (gzip.compress(ZIP), "gzip"),
    "bzip2": (bz2.compress(ZIP), "bzip2"),
    "xz": (lzma.compress(ZIP), "xz"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(50), "zstd"),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c" + bytes(50), "7-Zip"),
    "RAR": (b"Rar!\x1a\x07\1\0" + bytes(50), "RAR"),
    "ELF": (b"\x7fELF" + bytes(50), "ELF"),
    **{f"pickle, protocol {p}": (pickle.dumps({"a": 1}, p), f"plain pickle .protocol {p}") for p in range(6)},
    "joblib": (pickle.dumps({"joblib.numpy_pickle": 1}, 4), "joblib.load"),
    "metadata of DCP": (b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)R.", "dcp_to_torch_save"),
    "data.pkl alone": (PERSISTENT, "data.pkl of an unpacked checkpoint"),
    "pickle with an archive in it": (pickle.dumps(ZIP, 4), "plain pickle"),
    "legacy, CR LF": (legacy(2).replace(b"\n", b"\r\n"), "line ends were translated"),
    "legacy, decoded": (legacy(2).decode("ascii", "replace").encode(), "U\\+FFFD"),
    "split archive, a part": (b"PK\7\x08" + bytes(100), "not a checkpoint of a known kind"),
    "three bytes": (b"PK\3", "begins with|plain text"),
    "a byte": (b"\x80", "begins with the bytes 80"),
    "noise": (bytes(range(256)) * 8, "begins with the bytes 00 01 02"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "words"), SENTENCES.values(), ids=SENTENCES)
def test_sentences(data, words):
    with pytest.raises(FormatError, match=words) as caught:
        kind(open_source(memoryview(data)))
    assert caught.value.path == "<memoryview>"
    assert "\n" not in str(caught.value)


def test_the_name_does_not_matter(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(ZIP)
    assert kind(open_source(path)) == "zip"
    path.write_bytes(HTML)
    with pytest.raises(FormatError, match=r"model\.safetensors: this is an HTML page"):
        kind(open_source(path))


@pytest.mark.parametrize("nbytes", range(16))
def test_a_number_that_is_cut(nbytes):
    assert (first_integer(legacy(2)[:nbytes]) == MAGIC) == (nbytes >= 14)
    with pytest.raises(FormatError):
        kind(open_source(memoryview(legacy(4)[:nbytes])))


def test_every_first_byte():
    """Whatever stands first, there is an answer."""
    for first in range(256):
        for rest in (b"", b"\0" * 20, b"\xff" * 2000, b"(" * 100, ZIP):
            try:
                answer = kind(open_source(bytearray([first]) + rest))
            except FormatError as error:
                answer = str(error)
            assert answer in ("zip", "legacy", "tar") or answer.startswith("<bytearray>: ")
