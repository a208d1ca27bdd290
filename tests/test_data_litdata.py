"""LitDataReader: every envelope, leaf and container, item by item against a slow parser."""

import collections
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import litdatacraft as craft
from fastckpt import FormatError, UnsafePickleError, UnsupportedError
from fastckpt.data import LitDataReader, fernet_key
from fastckpt.data import litdata_chunks as chunks_module
from fastckpt.data.collate import collate
from support import same

LIBRARIES = {"framed": "zstandard", "zstd": "zstandard", "fernet": "cryptography"}
Pair = collections.namedtuple("Pair", "left right")

FORMATS = [
    "int", "float", "bool", "str", "bytes", "tensor", "tensor", "tensor", "no_header_tensor:18", "numpy",
    "no_header_numpy:9", "json", "jpeg", "no_header_tensor:20",
]  # fmt: skip
TREE = dict.fromkeys("abcdefghij") | {"k": [None, {"deep": (None, None)}], "l": None}
NUMBERS = ["int", "int", "float", "bool", "tensor", "no_header_tensor:1", "numpy"]


def row(i, length=3):
    """Leaves of FORMATS, of sizes that differ from one sample to the next unless ``length`` is fixed."""
    return [
        i - 2, i / 3, i % 2 == 0, "é" * i, bytes(range(i)), torch.tensor(i * 1.5),
        torch.arange(6.0).reshape(2, 3) + i, torch.empty(0, 4), torch.arange(i + 1),
        np.arange(4, dtype="u2").reshape(2, 2) + i, np.full(length, i, "f4"), {"i": [i, "x"]},
        b"\xff\xd8" + bytes([i]), torch.arange(2).to(torch.uint16),
    ]  # fmt: skip


def numbers(i):
    matrix = torch.full((2, 2), float(i))
    return [i, -i, i / 7, i % 3 == 0, matrix, torch.full((5,), i + 0.5), np.full((3, 1), i, "i2")]


def needs(envelope):
    if library := LIBRARIES.get(envelope.partition("-")[0]):
        pytest.importorskip(library)
    if envelope == "fernet-in-zstd":
        pytest.importorskip("zstandard")


def key_for(envelope):
    return {"key": craft.KEY} if envelope.startswith("fernet") else {}


@pytest.fixture
def folder(tmp_path):
    return craft.write(tmp_path / "set", FORMATS, TREE, [row(i) for i in range(12)])


@pytest.fixture
def expected(folder):
    return list(craft.parse(folder, TREE))


def simple(tmp_path, tree, count=7, **more):
    """A data set of ints and text in containers."""
    leaves = json.dumps(craft.spec(tree)).count('null, "context": null')
    rows = [[100 * i + k if k % 2 == 0 else str(k) for k in range(leaves)] for i in range(count)]
    formats = ["int" if k % 2 == 0 else "str" for k in range(leaves)]
    return craft.write(tmp_path / "set", formats, tree, rows, **more)


# ---- what is read


@pytest.mark.parametrize("mmap", [False, True, (1,)], ids=["read", "mapped", "one mapped"])
@pytest.mark.parametrize("envelope", craft.ENVELOPES)
def test_samples_are_those_of_the_slow_parser(tmp_path, folder, expected, envelope, mmap):
    needs(envelope)
    rows = [row(i) for i in range(12)]
    other = craft.write(tmp_path / "other", FORMATS, TREE, rows, envelope=envelope)
    with LitDataReader(other, mmap, **key_for(envelope)) as reader:
        assert len(reader) == 12
        same(expected, list(reader))
        same(expected, reader.read_many(range(12)))
        same(expected, [reader[i] for i in range(12)])
        order = [3, 11, 3, 0, -1, 4, 5, 6, 3]
        for i, sample in zip(order, reader.read_many(order), strict=True):
            same(expected[i], sample)
        same(collate(expected[2:3] * 2), reader.read_batch([2, 2]))


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("envelope", ["classic", "framed", "zstd-sample"])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_batches_are_collated_samples(tmp_path, envelope, chunk, framework):
    needs(envelope)
    tree = {"x": None, "y": [None, (None, None)], "z": {"m": None, "v": None, "a": None}}
    rows = [numbers(i) for i in range(9)]
    path = craft.write(tmp_path / "set", NUMBERS, tree, rows, chunk=chunk, envelope=envelope)
    reader = LitDataReader(path, framework=framework)
    for indices in (range(9), [4], [8, 0, 0, -2, 5], np.array([1, 7, 3])):
        same(collate(reader.read_many(indices), framework), reader.read_batch(indices))


CONTAINERS = {
    "leaf": None,
    "dict": {"a": None, "b": None},
    "dict of other keys": {1: None, None: None, 2.5: None},
    "list": [None, None],
    "tuple": (None, None),
    "empty": {},
    "nested": {"a": [None, (None, {"b": None})], "c": ()},
    "deep": [[[[[[None]]]]]],
    "ordered": collections.OrderedDict(b=None, a=[None]),
    "default": collections.defaultdict(list, a=None, b=(None, None)),
    "deque": collections.deque([None, None], 5),
    "namedtuple": {"p": Pair(None, [None])},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path, name):
    path = simple(tmp_path, CONTAINERS[name])
    reader = LitDataReader(path, types={"Pair": Pair})
    samples = list(craft.parse(path, CONTAINERS[name]))
    same(samples, reader.read_many(range(7)))
    same(samples[3], reader[3])
    if name != "dict of other keys":
        same(collate(samples), reader.read_batch(range(7)))
    if name == "default":
        assert reader[0].default_factory is list
    if name == "deque":
        assert reader[0].maxlen == 5
    same(samples, pickle.loads(pickle.dumps(reader)).read_many(range(7)))


DTYPES = sorted({str(dtype) for dtype in craft.TENSORS})


@pytest.mark.parametrize("number", range(len(craft.TENSORS)))
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_element_types_of_tensors(tmp_path, number, framework):
    value = (torch.arange(6) % 2).to(craft.TENSORS[number])
    formats = ["tensor", f"no_header_tensor:{number}", "tensor", "tensor"]
    leaves = [value.reshape(3, 1, 2), value, value[0], value[:0].reshape(2, 0)]
    leaves = [leaf.clone() for leaf in leaves]
    path = craft.write(tmp_path / "set", formats, [None] * 4, [leaves] * 2)
    reader = LitDataReader(path, framework=framework)
    stacked = [torch.stack([leaf, leaf]) for leaf in leaves]
    for want, got in ((leaves, reader[1]), (stacked, reader.read_batch([0, 1]))):
        if framework == "torch":
            same(want, got)
            assert all(leaf.data_ptr() % 64 == 0 for leaf in got)
        else:
            shapes = [(tuple(leaf.shape), craft.raw(leaf.reshape(-1))) for leaf in want]
            assert [(leaf.shape, leaf.tobytes()) for leaf in got] == shapes


@pytest.mark.parametrize("number", range(len(craft.ARRAYS)))
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_element_types_of_arrays(tmp_path, number, framework):
    value = (np.arange(6) % 2).astype(craft.ARRAYS[number])
    formats = ["numpy", f"no_header_numpy:{number}"]
    path = craft.write(tmp_path / "set", formats, [None] * 2, [[value.reshape(3, 2), value]] * 2)
    reader = LitDataReader(path, framework=framework)
    same([value.reshape(3, 2), value], reader[1])
    same(collate(reader.read_many([0, 1]), framework), reader.read_batch([0, 1]))


def u32(*numbers):
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def text(value):
    return u32(len(value.encode())) + value.encode()


JSON = {
    "text of old versions": (b' {"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
    "JSON": (b"\0" + text('[{"x": "\u00e9"}]'), [{"x": "é"}]),
    "texts": (b"\1" + u32(2) + text("é") + text(""), ["é", ""]),
    "ints": (b"\2" + u32(2) + (5).to_bytes(8, "little") + b"\xff" * 8, [5, -1]),
    "floats": (b"\3" + u32(1) + np.float64(0.1).tobytes(), [0.1]),
    "bools": (b"\4" + u32(3) + b"\1\0\2", [True, False, True]),
    "dict": (
        b"\5" + u32(2) + text("k") + b"\7" + text("v") + text("n") + b"\5" + u32(0),
        {"k": "v", "n": {}},
    ),
    "records": (
        b"\6" + u32(2, 2) + text("a") + text("b") + b"\x10\x11" + text("s") + b"\x14\1"
        b"\x13" + np.float64(2).tobytes(),
        [{"a": None, "b": "s"}, {"a": True, "b": 2.0}],
    ),
    "int": (b"\x08" + (-3).to_bytes(8, "little", signed=True), -3),
    "float": (b"\x09" + np.float64(1.5).tobytes(), 1.5),
    "bool": (b"\x0a\1", True),
    "None": (b"\x0b", None),
    "empty list": (b"\1" + u32(0), []),
}  # fmt: skip


@pytest.mark.parametrize("name", JSON)
def test_json_leaves(tmp_path, monkeypatch, name):
    payload, value = JSON[name]
    monkeypatch.setitem(craft.ENCODE, "json", bytes)
    reader = LitDataReader(craft.write(tmp_path / "set", ["json"], [None], [[payload]]))
    same([value], reader[0])


def test_decoders_and_media(tmp_path):
    path = craft.write(tmp_path / "set", ["jpeg", "int"], [None, None], [[b"abc", 4]])
    assert LitDataReader(path)[0] == [b"abc", 4]
    assert LitDataReader(path, decoders={"jpeg": len})[0] == [3, 4]


def test_samples_belong_to_the_caller(folder, expected):
    for mmap in (False, True):
        reader = LitDataReader(folder, mmap)
        one, other = reader.read_many([5, 5])
        one["g"].fill_(-1)
        one["j"][:] = 9
        one["i"].add_(1)
        same(expected[5], other)
        assert one["g"].untyped_storage().nbytes() == 6 * 4
        assert one["j"].flags.owndata
        reader.close()
        same(expected[5], other)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_samples_stay_when_their_file_is_written_anew(folder, expected, mmap):
    reader = LitDataReader(folder, mmap)
    samples, batch = reader.read_many([3, 4]), reader.read_batch([5])
    for chunk in folder.glob("chunk*"):
        with open(chunk, "r+b") as f:
            f.write(bytes(chunk.stat().st_size))
    same(expected[3:5], samples)
    same(collate(expected[5:6]), batch)


@pytest.mark.parametrize("envelope", craft.ENVELOPES)
def test_a_single_sample_decodes_no_other(tmp_path, envelope):
    needs(envelope)
    rows = [[bytes([i])] for i in range(20)]
    path = craft.write(tmp_path / "set", ["jpeg"], [None], rows, chunk=10, envelope=envelope)
    decoded = []
    reader = LitDataReader(path, decoders={"jpeg": decoded.append}, **key_for(envelope))
    for i in (3, 17, 3, -1, 4):
        reader[i]
    assert decoded == [bytes([i]) for i in (3, 17, 3, 19, 4)]


def test_indices_are_those_of_a_list(folder, expected):
    reader = LitDataReader(folder)
    for _ in range(2):  # also where the chunk was used before
        for i in (0, 11, 5, -1, -12, np.int64(6), torch.tensor(7), True):
            same(expected[i], reader[i])
        for i in (12, -13, 2**70):
            with pytest.raises(IndexError, match=rf"index {i} .* there are 12 samples"):
                reader[i]
        for i in (1.0, "1", None):
            with pytest.raises(TypeError, match="an index is a whole number"):
                reader[i]
        same(expected[3:7], reader[3:7])
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader[7]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["tensor", torch.zeros(2, 2), torch.zeros(2, 3)], "equal size"),
        (["no_header_tensor:1", torch.zeros(2), torch.zeros(3)], "equal size"),
        (["numpy", np.zeros((2, 2)), np.zeros((2, 3))], "equal size"),
    ],
    ids=["tensor", "flat tensor", "array"],
)
def test_shapes_that_differ_are_what_collating_says(tmp_path, shapes, message):
    path = craft.write(tmp_path / "set", shapes[:1], [None], [[shape] for shape in shapes[1:]])
    with pytest.raises(RuntimeError, match=message):
        LitDataReader(path).read_batch([0, 1])


# ---- Arrow tables


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "stream"])
@pytest.mark.parametrize("last", [7, "x"], ids=["numbers", "text"])
def test_rows_of_an_arrow_table(tmp_path, is_file, last):
    pytest.importorskip("pyarrow")
    samples = [{"a": i, "b": i / 2, "c": i % 2 == 0, "d": last} for i in range(9)]
    data = craft.arrow(samples, is_file)
    (tmp_path / "chunk-0-0.bin").write_bytes(data)
    entry = {"filename": "chunk-0-0.bin", "chunk_bytes": len(data), "chunk_size": 9}
    formats = ["int", "float", "bool", "int" if last == 7 else "str"]
    craft.write_index(tmp_path, [entry], formats, dict.fromkeys("abcd"))
    reader = LitDataReader(tmp_path)
    same(samples, list(reader))
    assert reader.read_many([4, 2, 4]) == [samples[i] for i in (4, 2, 4)]
    same(samples[8], reader[-1])
    same(collate(samples[3:6]), reader.read_batch(range(3, 6)))


def test_an_arrow_table_without_pyarrow_is_an_error_that_says_so(tmp_path, monkeypatch):
    """The same program writes such chunks where pyarrow is installed, and ordinary ones where it is not."""
    pytest.importorskip("pyarrow")
    (tmp_path / "c.bin").write_bytes(craft.arrow([{"a": 1}] * 3))
    craft.write_index(tmp_path, [{"filename": "c.bin", "chunk_size": 3}], ["int"], {"a": None})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"pyarrow is not.*Arrow table.*extra 'arrow'"):
        LitDataReader(tmp_path)[0]


def test_an_arrow_table_of_another_length_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    data = craft.arrow([{"a": 1}] * 3).replace(
        (3).to_bytes(4, "little"), (2).to_bytes(4, "little"), 1
    )
    data = craft.classic([b"", b""]) + craft.arrow([{"a": 1}] * 3)[4 + 4 * 4 :]
    (tmp_path / "c.bin").write_bytes(data)
    craft.write_index(tmp_path, [{"filename": "c.bin", "chunk_size": 2}], ["int"], {"a": None})
    with pytest.raises(
        FormatError, match=r"c\.bin: its Arrow table has 3 rows, and the index says 2"
    ):
        LitDataReader(tmp_path)[0]


# ---- what is refused


def test_pickles_are_refused(tmp_path):
    path = craft.write(tmp_path / "set", ["int", "pickle"], [None, None], [[1, pickle.dumps({3})]])
    with pytest.raises(
        UnsafePickleError, match=r"leaf 1 .*pickle.*nothing was run.*allow_pickle=True"
    ):
        LitDataReader(path)
    assert LitDataReader(path, allow_pickle=True)[0] == [1, {3}]
    assert LitDataReader(path, decoders={"pickle": bytes})[0] == [1, pickle.dumps({3})]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"item_loader": "TokensLoader"}, "'TokensLoader'"),
        ({"format": "mds"}, "Mosaic"),
        ({"data_format": ["mine"]}, r"'mine'.*decoders="),
        ({"compression": "lz4"}, "'lz4'"),
        ({"compression": "zstd", "compression_level": "row"}, "'row'"),
        ({"encryption": {"algorithm": "rsa", "level": "chunk"}}, "'rsa'"),
        ({"data_spec": json.dumps([1, craft.spec(Pair(None, None))])}, "'Pair'.*types="),
        (
            {
                "data_spec": json.dumps(
                    [1, craft.spec(collections.defaultdict(os.system.__class__, a=None))]
                )
            },
            "defaultdict",
        ),
    ],
    ids=["loader", "mds", "leaf", "codec", "level", "rsa", "namedtuple", "factory"],
)
def test_what_is_not_read_is_named(tmp_path, config, words):
    craft.write_index(tmp_path, [], **{"formats": ["int"], "tree": [None]}, **config)
    with pytest.raises(UnsupportedError, match=f"index.json: .*{words}"):
        LitDataReader(tmp_path)


@pytest.mark.parametrize(
    ("module", "envelope", "extra"),
    [("zstandard", "framed", "data"), ("cryptography", "fernet-chunk", "encryption")],
)
def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, module, envelope, extra):
    needs(envelope)
    path = craft.write(tmp_path / "set", ["int"], [None], [[1]], envelope=envelope)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{module} is not installed.*extra '{extra}'"):
        LitDataReader(path, **key_for(envelope))


# Arguments that cannot be meant, for a data set of two chunks.
WRONG = {
    "mmap": ({"mmap": "x"}, TypeError, "mmap='x': True, False, or numbers of chunks"),
    "mmap of a number": ({"mmap": 1}, TypeError, "mmap=1: True, False, or numbers of chunks"),
    "mmap of names": ({"mmap": ["a"]}, TypeError, "mmap: chunk='a': a whole number"),
    "mmap from the end": ({"mmap": {-1}}, ValueError, "mmap: chunk=-1: at least 0"),
    "mmap of what is not there": ({"mmap": [0, 2]}, ValueError, "mmap: chunk 2 is asked for, and there are 2"),
    "decoders": ({"decoders": {"jpeg": 3}}, TypeError, "decoders=.*a dict of names to callables"),
    "types": ({"types": "x"}, TypeError, "types='x': a dict of names to callables"),
    "cache": ({"cache_nbytes": "a"}, TypeError, "cache_nbytes='a': a whole number"),
    "less than no cache": ({"cache_nbytes": -1}, ValueError, "cache_nbytes=-1: at least 0"),
    "key": ({"key": 5}, TypeError, r"key: what fernet_key\(\) gives is expected, not an int"),
    "key of plain data": ({"key": craft.KEY}, ValueError, "is not encrypted, and key= is given"),
    "framework": ({"framework": "jax"}, ValueError, "framework='jax'"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(tmp_path, options, error, words):
    path = craft.write(tmp_path / "set", ["int"], [None], [[1], [2]], chunk=1)
    with pytest.raises(error, match=words):
        LitDataReader(path, **options)


def test_keys(tmp_path):
    pytest.importorskip("cryptography")
    path = craft.write(tmp_path / "set", ["int"], [None], [[1]], envelope="fernet-sample")
    with pytest.raises(ValueError, match="encrypted; key= is needed"):
        LitDataReader(path)
    other = LitDataReader(path, key=craft.KEY[::-1].replace(b"=", b"") + b"=")
    with pytest.raises(FormatError, match=r"item 0: it cannot be decrypted"):
        other[0]
    salt = tmp_path / "key.json"
    salt.write_text(
        '{"algorithm": "fernet", "level": "sample", "salt": "AAECAwQFBgcICQoLDA0ODw=="}'
    )
    assert fernet_key(salt, "secret") == b"AYh0MNJROlP-FSWKVCddjqF-33HGetOT-0JW1XpBvd0="
    salt.write_text("{}")
    with pytest.raises(ValueError, match="no salt"):
        fernet_key(salt, "secret")


# ---- files, processes, threads


def test_nothing_in_the_folder_is_touched(tmp_path):
    pytest.importorskip("zstandard")
    path = craft.write(
        tmp_path / "set", FORMATS, TREE, [row(i) for i in range(7)], envelope="zstd-chunk"
    )

    def state():
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}

    before = state()
    for p in path.iterdir():
        p.chmod(0o400)
    path.chmod(0o500)
    try:
        assert len(list(LitDataReader(path, True))) == 7
    finally:
        path.chmod(0o700)
    assert state() == before


def test_a_folder_that_litdata_has_inflated_in_place_is_read(tmp_path):
    pytest.importorskip("zstandard")
    path = craft.write(tmp_path / "set", ["int"], [None], [[5]], envelope="zstd-chunk")
    (path / "chunk-0-0.zstd.bin").unlink()
    (path / "chunk-0-0.bin").write_bytes(craft.classic([craft.item(["int"], [5])]))
    assert LitDataReader(path)[0] == [5]


def test_an_index_of_old_versions_tells_the_bytes_of_items(tmp_path):
    pytest.importorskip("zstandard")
    path = craft.write(tmp_path / "set", ["int"], [None], [[5]] * 3, envelope="zstd-chunk")
    index = json.loads((path / "index.json").read_text())
    index["chunks"][0]["chunk_bytes"] = 3 * 12
    (path / "index.json").write_text(json.dumps(index))
    assert list(LitDataReader(path)) == [[5]] * 3


def open_files(folder):
    """What of a folder this process has open, or mapped."""
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [x for x in links if str(folder) in x], [x for x in maps if str(folder) in x]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux says what is open")
def test_files_and_mappings_are_few_and_given_back(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks_module, "MOST_OPEN", 2)
    path = simple(tmp_path, {"a": None}, count=12, chunk=2)
    reader = LitDataReader(path, True)
    assert open_files(path) == ([], [])
    assert [sample["a"] for sample in reader] == [100 * i for i in range(12)]
    reader.read_many([0, 11, 5])
    files, maps = open_files(path)
    assert 1 <= len(files) <= 2
    assert 1 <= len(maps) <= 2
    again = pickle.loads(pickle.dumps(reader))
    reader.close()
    assert open_files(path) == ([], [])
    assert again[3] == {"a": 300}
    with pytest.raises(ValueError, match="closed"):
        reader[0]


def test_inflated_frames_are_bounded(tmp_path):
    pytest.importorskip("zstandard")
    rows = [[bytes(1000) + bytes([i])] for i in range(30)]
    path = craft.write(tmp_path / "set", ["bytes"], [None], rows, chunk=15, envelope="framed")
    reader = LitDataReader(path, cache_nbytes=7000)
    for order in (range(30), range(29, -1, -1), [3, 20] * 9):
        assert reader.read_many(order) == [rows[i] for i in order]
        entries = reader._chunks.cache._entries.values()
        assert sum(entry.nbytes for entry in entries) <= 7000


def sample_of(reader, index):
    return reader[index]


def test_forked_workers(folder):
    reader = LitDataReader(folder, True, framework="numpy")
    wanted = [reader[i]["i"].tolist() for i in range(3)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.starmap(sample_of, [(reader, i) for i in range(3)])
    assert [sample["i"].tolist() for sample in found] == wanted


def test_a_reader_that_was_opened_before_a_fork_works_in_the_child(folder, expected):
    reader = LitDataReader(folder, True)
    reader.read_many(range(12))
    pid = os.fork()
    if pid == 0:
        good = [sample["a"] for sample in reader.read_many(range(12))] == [i - 2 for i in range(12)]
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    same(expected, list(reader))


def test_torch_loads_from_it(folder):
    loader = torch.utils.data.DataLoader(LitDataReader(folder), batch_size=4, collate_fn=list)
    assert [sample["a"] for batch in loader for sample in batch] == [i - 2 for i in range(12)]


@pytest.mark.parametrize("envelope", ["classic", "framed", "zstd-sample"])
def test_threads_share_a_reader(tmp_path, monkeypatch, envelope):
    needs(envelope)
    monkeypatch.setattr(chunks_module, "MOST_OPEN", 2)
    rows = [numbers(i) for i in range(60)]
    tree = dict.fromkeys("abcdefg")
    path = craft.write(tmp_path / "set", NUMBERS, tree, rows, chunk=7, envelope=envelope)
    reader = LitDataReader(path, True, cache_nbytes=2000)
    start, wrong = threading.Barrier(4), []

    def work(seed):
        generator = np.random.default_rng(seed)
        start.wait()
        for _ in range(20):
            order = generator.integers(0, 60, 9)
            if [sample["a"] for sample in reader.read_many(order)] != order.tolist():
                wrong.append(order)
            if reader.read_batch(order)["b"].tolist() != (-order).tolist():
                wrong.append(order)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numpy_needs_no_torch(tmp_path):
    path = craft.write(
        tmp_path / "set", NUMBERS, dict.fromkeys("abcdefg"), [numbers(i) for i in range(3)]
    )
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fastckpt.data import LitDataReader\n"
        f"reader = LitDataReader({str(path)!r}, framework='numpy')\n"
        "assert reader[2]['e'].tolist() == [[2, 2], [2, 2]]\n"
        "assert reader.read_batch([1, 2])['f'].shape == (2, 5)\n"
        "try: LitDataReader(reader._folder)\n"
        "except ModuleNotFoundError as error: assert 'framework=' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- LitData itself, where it is installed


def litdata_rows(i):
    return {
        "idx": i, "neg": -i, "score": i / 3, "flag": i % 2 == 0, "name": "n" * i, "raw": bytes(range(i)),
        "x": torch.full((2, 3), float(i)), "h": torch.full((2, 2), i, dtype=torch.float16),
        "v": torch.arange(i + 1), "scalar": torch.tensor(i), "a1": np.arange(3.0) + i, "u": torch.zeros(0, 3),
        "a2": np.full((2, 2), i, "i4"), "nest": [i, {"deep": (torch.ones(2) * i, i)}], "list": ["a", "b" * i],
        "b": torch.tensor([i % 2 == 0, True]), "j": {"k": i, "t": [1, 2.5, None]},
    }  # fmt: skip


def plain_rows(i):
    """Samples that LitData stores as rows of an Arrow table."""
    parts = {"l": [i] * (i % 3), "d": {"k": i / 2, "b": bytes(i)}, "r": [{"t": "u"}]}
    return {"a": i, "s": "x" * i} | parts


# of its own reading: of views that are read-only, and files that it leaves open
LITDATA_WARNS = pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def write_with_litdata(folder, samples, **options):
    cache_module = pytest.importorskip("litdata.streaming.cache")
    if "compression" in options:
        pytest.importorskip("zstd")
    cache = cache_module.Cache(str(folder), chunk_size=4, **options)
    for i, sample in enumerate(samples):
        cache[i] = sample
    cache.done()
    cache.merge()


def read_with_litdata(folder, **options):
    import litdata

    return list(litdata.StreamingDataset(str(folder), shuffle=False, **options))


def same_samples(theirs, ours):
    for want, got in zip(theirs, ours, strict=True):
        assert list(want) == list(got)
        for name, value in want.items():  # LitData gives views of a mapping for bytes
            same(bytes(value) if isinstance(value, memoryview) else value, got[name])


@LITDATA_WARNS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "zstd"},
        {"compression": "zstd", "compression_level": "sample"},
        {"compression": "zstd", "compression_level": "chunk"},
    ],
    ids=["plain", "framed", "sample", "chunk"],
)
def test_what_litdata_writes(tmp_path, options):
    write_with_litdata(tmp_path, map(litdata_rows, range(10)), **options)
    ours = list(LitDataReader(tmp_path))  # first: LitData inflates whole-file zstd in place
    same_samples(read_with_litdata(tmp_path), ours)
    same_samples(ours, list(LitDataReader(tmp_path, True)))


@LITDATA_WARNS
@pytest.mark.parametrize("level", ["sample", "chunk"])
def test_what_litdata_encrypts(tmp_path, level):
    encryption_module = pytest.importorskip("litdata.utilities.encryption")
    pytest.importorskip("cryptography")
    encryption = encryption_module.FernetEncryption("secret", level)
    encryption.save(tmp_path / "key.json")
    write_with_litdata(tmp_path / "set", map(litdata_rows, range(10)), encryption=encryption)
    reader = LitDataReader(tmp_path / "set", key=fernet_key(tmp_path / "key.json", "secret"))
    same_samples(read_with_litdata(tmp_path / "set", encryption=encryption), list(reader))


@LITDATA_WARNS
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}], ids=["plain", "zstd"])
def test_what_litdata_writes_as_rows_of_a_table(tmp_path, options):
    pytest.importorskip("pyarrow")
    samples = [plain_rows(i) for i in range(10)]
    write_with_litdata(tmp_path, samples, **options)
    same_samples(samples, list(LitDataReader(tmp_path)))


@LITDATA_WARNS
def test_every_element_type_and_container_that_litdata_writes(tmp_path):
    tensors, arrays = sorted(set(craft.TENSORS) - {torch.bfloat16}, key=str), craft.ARRAYS

    def one():
        return torch.ones(1)

    sample = {
        "tensors": [
            [(torch.arange(4) % 2).to(dtype).reshape(shape) for dtype in tensors]
            for shape in [(4,), (2, 2)]
        ],
        "none": [torch.zeros(0), torch.zeros(0, 2), torch.tensor(5)],
        "arrays": [
            [(np.arange(4) % 2).astype(dtype).reshape(shape) for dtype in arrays]
            for shape in [(4,), (2, 2)]
        ],
        # with a tensor in each, or they would be stored as JSON
        "tuple": (1, (2.5, "x"), (), one()),
        "ordered": collections.OrderedDict(b=1, a=(2, one())),
        "default": collections.defaultdict(list, k=one()),
        "deque": collections.deque([1, one()], 4),
        "numbers": [2**63 - 1, -(2**63), float("inf"), True],
        "texts": ["", "\u20ac"],
        "none at all": b"",
        "bytes": b"\0\xff",
    }
    write_with_litdata(tmp_path, [sample] * 5)
    theirs = read_with_litdata(tmp_path)
    ours = list(LitDataReader(tmp_path))
    for want, got in zip(theirs, ours, strict=True):
        assert list(want) == list(got)
        for name, value in sample.items():  # LitData makes plain dicts of others
            same(dict(value) if isinstance(value, dict) else value, got[name], name)


@LITDATA_WARNS
@pytest.mark.parametrize("top", [7, 1.5, "text", [1, 2], (1, "x"), torch.ones(2)], ids=repr)
def test_samples_that_are_no_dicts_of_litdatas(tmp_path, top):
    write_with_litdata(tmp_path, [top] * 5)
    samples = list(LitDataReader(tmp_path))
    assert len(samples) == 5
    for sample in samples:
        same(top, sample)


@LITDATA_WARNS
def test_pickles_and_pictures_that_litdata_writes(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    picture = image_module.new("RGB", (2, 3), (1, 2, 3))
    write_with_litdata(tmp_path, [{"p": picture, "set": {1, i}} for i in range(5)])
    with pytest.raises(UnsafePickleError, match=r"leaf 1 .*pickle"):
        LitDataReader(tmp_path)
    sample = LitDataReader(tmp_path, allow_pickle=True)[4]
    assert sample["set"] == {1, 4}
    assert picture.tobytes() in sample["p"]
