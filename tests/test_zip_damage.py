"""ZIP archives that are refused, and in which words; no damage is ever more than an error."""

import random
import struct

import pytest

from fastckpt.errors import CheckpointError, ChecksumError, FormatError, UnsupportedError
from zipcraft import MAX32, PICKLE, Entry, archive, checkpoint
from ziptools import DATA_0, GOOD, STORAGES, changed, contents, opened


def twice(name):
    return [*checkpoint(), Entry(name, b"other")]


def outside(**fields):
    """A record that the directory says is elsewhere or larger."""
    return archive(changed(DATA_0, **fields))


def renamed(name):
    """The record of the byte order, by another name in the directory."""
    return changed(1, name=name, local_name="archive/byteorder")


INNER = archive([Entry("archive/data.pkl", b"bad"), *checkpoint()[1:]])
COMMENTED = archive(checkpoint(), comment=INNER)
FORGED = (
    b"PK\3\4"
    + struct.pack("<HHHHHIIIHH", 0, 0x800, 0, 0, 0, 0, 3, 3, 16, 0)
    + b"archive/data.pklbad"
)
HIDDEN = archive(checkpoint([FORGED]))

BROKEN = {
    # the end records
    "no end record": (GOOD[:-30], "without its end record.*truncated after"),
    "end record cut": (archive(checkpoint())[:-1], "end record is cut off"),
    "zeros instead of the end": (GOOD[:-100] + b"\0" * 100, "filled up with zeros"),
    "text transfer": (GOOD[:60] + b"a\r\nb\r\n", "CR LF"),
    "split archive": (archive(checkpoint(), end={"disk": 2}), "split archive"),
    "entries on another disk": (archive(checkpoint(), end={"here": 1}), "split archive"),
    "count too small": (archive(checkpoint(), end={"here": 3, "count": 3}), "counts no more entries"),
    "count too large": (archive(checkpoint(), end={"here": 5, "count": 5}), "the directory ends before"),
    "count far too large": (archive(checkpoint(), end={"here": 60000, "count": 60000}), "60000 entries in"),
    "no entries, but bytes": (archive(checkpoint(), end={"here": 0, "count": 0}), "0 entries in"),
    "directory too large": (archive(checkpoint(), end={"nbytes": MAX32 - 1}), "bytes of directory lie before it"),
    "directory too small": (archive(checkpoint(), end={"nbytes": 200}), "the directory ends|overlap|signature|numbers"),
    "directory elsewhere": (archive(checkpoint(), end={"offset": 7}), "says that the directory is at byte 7, it is at byte"),
    "directory behind the end": (archive(checkpoint(), end={"offset": 10**9}), "says that the directory is at byte"),
    "directory cut": (archive(checkpoint())[:300] + archive(checkpoint())[-22:], "there is none"),
    "zip64 disks": (archive(checkpoint(), wide=True, locator={"disks": 2}), "2 disks"),
    "zip64 record outside": (archive(checkpoint(), wide=True, locator={"offset": 2**63}), "locator points to byte"),
    "zip64 record too short": (archive(checkpoint(), wide=True, end_64={"size": 43}), "44 to 44 are possible"),
    "zip64 record too long": (archive(checkpoint(), wide=True, end_64={"size": 2**64 - 1}), "44 to 44 are possible"),
    "zip64 disagrees": (archive(checkpoint(), wide=True, end_64={"count": 5}), "says entries 4, the zip64"),
    "zip64 offset wraps": (
        archive(checkpoint(), wide=True, end={"offset": MAX32}, end_64={"offset": 2**64 - 100}),
        "says that the directory is at byte",
    ),
    "zip64 nbytes wraps": (
        archive(checkpoint(), wide=True, end={"nbytes": MAX32}, end_64={"nbytes": 2**64 - 100}),
        "bytes of directory lie before it",
    ),
    # the directory
    "entry signature": (GOOD.replace(b"PK\1\2", b"PK\1\0").replace(b"PK\1\0", b"PK\1\2", 1), r"signature \(50 4b 01 02\)"),
    "zip64 extra missing a number": (
        archive(changed(DATA_0, nbytes=MAX32, extra=struct.pack("<HHI", 1, 4, 0))),
        "zip64 extra field lacks",
    ),
    "zip64 extra cut": (
        archive(changed(DATA_0, nbytes=MAX32, stored=MAX32, extra=struct.pack("<HH", 1, 500))),
        "zip64 extra field lacks",
    ),
    "entry on another disk": (archive(changed(DATA_0, disk=2)), "another disk"),
    "masked entry": (archive(changed(DATA_0, flags=0x2000)), "masked"),
    "entry behind the directory": (outside(offset=10**6), "offset lies behind"),
    "entry at the end of 64 bits": (outside(offset=2**64 - 1), "offset lies behind"),
    "entry larger than the file": (outside(stored=10**9, nbytes=10**9), "larger than the file"),
    "entry that wraps": (outside(stored=2**64 - 16, nbytes=2**64 - 16), "larger than the file"),
    "entry of 2**63 bytes": (outside(nbytes=2**63), "more than 63 bits"),
    "entry over the next": (outside(stored=200, nbytes=200), "its 200 bytes overlap"),
    "last entry over the directory": (archive(changed(5, stored=60, nbytes=60)), "overlap"),
    "two entries at one place": (outside(offset=0), "overlap"),
    "entry inside another": (
        archive([*checkpoint([FORGED]), Entry("archive/data/9", b"bad", local=False, offset=HIDDEN.find(FORGED))]),
        "overlap",
    ),
    # who is meant
    "two data.pkl": (archive(twice("archive/data.pkl")), "'data.pkl'.*two records of this name"),
    "two storages": (archive(twice("archive/data/0")), "'data/0'.*two records of this name"),
    "two versions": (archive(twice("archive/version")), "'version'.*two records"),
    "two byteorders": (archive(twice("archive/byteorder")), "'byteorder'.*two records"),
    "two folders": (archive([*checkpoint(), *checkpoint(root="other/")]), "two checkpoints"),
    "a folder in a folder": (archive([*checkpoint(), *checkpoint(root="archive/b/")]), "two checkpoints"),
    "two archives": (archive(checkpoint()) * 2, "two directories.*two archives in one file.*dcp_to_torch_save"),
    "two archives of unlike size": (archive(checkpoint()) + GOOD, "begins at byte 0.*two archives in one file.*dcp_to_torch_save"),
    "two archives, the second unlike": (GOOD + archive(checkpoint()), "two archives in one file"),
    "a broken zip64 archive in the comment": (
        archive(checkpoint(), comment=archive(checkpoint(), wide=True, locator={"disks": 2})),
        "2 disks",
    ),
    "two archives, far apart": (archive(checkpoint()) + archive(checkpoint([b"1" * 99999])), "two archives"),
    "two archives, counted": (archive(checkpoint(), before=archive(checkpoint())), "two archives"),
    "an archive in the comment": (COMMENTED, "two archives in one file"),
    "an archive in the comment, junk in front": (
        archive(checkpoint(), before=b"#!", comment=archive(checkpoint())),
        "two directories.*comment",
    ),
    "another archive in the comment, junk in front": (
        archive(checkpoint(), before=b"#!", comment=GOOD),
        "two ZIP end records.*comment",
    ),
    "an empty archive in the comment": (
        archive(checkpoint(), comment=archive([])),
        "two archives in one file|two ZIP end records",
    ),
    # what a record says
    "version 0": (archive(checkpoint(version=b"0\n")), "'version'.*not a version number"),
    "version text": (archive(checkpoint(version=b"three")), "'version'.*not a version number"),
    "version empty": (archive(checkpoint(version=b"")), "'version'.*not a version number"),
    "byte order": (archive(checkpoint(byteorder=b"pdp11")), "pdp11.*not a known byte order"),
    "byte order with a newline": (archive(checkpoint(byteorder=b"little\n")), "not a known byte order"),
    "local name": (archive(changed(DATA_0, local_name="archive/data/9")), "calls it 'archive/data/9'"),
    "byte order by another name": (archive(renamed("archive/byteordes")), "'byteorder'.*calls it 'archive/byteordes'"),
    "byte order in another folder": (archive(renamed("brchive/byteorder")), "'byteorder'.*calls it 'brchive/byteorder'"),
    "local name shorter": (archive(changed(DATA_0, local_name="archive/data")), "calls it 'archive/data'"),
    "local signature": (archive(changed(DATA_0, local_signature=b"PK\3\5")), "found is 50 4b 03 05"),
    "local encryption": (archive(changed(DATA_0, local_flags=1)), "local header marks it as encrypted"),
    "stored with two sizes": (archive(changed(DATA_0, nbytes=11)), "has 11 bytes of content in 12"),
    "deflate bomb": (archive(changed(DATA_0, method=8, nbytes=10**9)), "1032 times at most"),
    "deflated to less": (archive(changed(DATA_0, method=8, nbytes=11)), "do not inflate"),
    "deflated to more": (archive(changed(DATA_0, method=8, nbytes=13)), "do not inflate"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "words"), BROKEN.values(), ids=BROKEN)
def test_broken(data, words):
    with pytest.raises(FormatError, match=words) as caught:
        contents(opened(data))
    assert caught.value.path == "<bytes>"
    assert not isinstance(caught.value, ChecksumError)


UNSUPPORTED = {
    "version 11": (archive(checkpoint(version=b"11")), "format version above 10"),
    "version of many digits": (archive(checkpoint(version=b"9" * 1000)), "format version above 10"),
    "encrypted": (archive(changed(DATA_0, flags=1)), "encrypted"),
    "strongly encrypted": (archive(changed(DATA_0, flags=0x41)), "encrypted"),
    "patch data": (archive(changed(DATA_0, flags=0x20)), "encrypted or masked"),
    "bzip2": (archive(changed(DATA_0, method=12)), r"method 12 \(bzip2\)"),
    "a method nobody knows": (archive(changed(DATA_0, method=77)), "method 77;"),
}


@pytest.mark.parametrize(("data", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported(data, words):
    with pytest.raises(UnsupportedError, match=words):
        opened(data)


FOREIGN = {
    "no entries": ([], "without entries"),
    "only folders": ([Entry("a/")], "only folders"),
    "npz": ([Entry("weight.npy", b"1"), Entry("bias.npy", b"2")], r"\.npy files.*\.npz; numpy.load"),
    "a model inside": ([Entry("readme.txt"), Entry("m/model.pth", b"1")], r"contains 'm/model.pth'; unpack it first"),
    "another case": ([Entry("a/DATA.PKL", PICKLE)], "'a/DATA.PKL'.*lower case"),
    "torch.package": ([Entry("a/.data/extern_modules"), Entry("a/m/x.py")], "torch.package"),
    "Keras": ([Entry("config.json"), Entry("model.weights.h5")], "Keras"),
    "torch.export": ([Entry("m/archive_format", b"pt2")], "torch.export"),
    "distributed": ([Entry("c/.metadata"), Entry("c/__0_0.distcp")], "distributed"),
    "anything": ([Entry(f"{i}.txt") for i in range(9)], "'0.txt', '1.txt', '2.txt' and 6 more"),
    "a name that only ends so": ([Entry("a/metadata.pkl")], "without data.pkl"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "words"), FOREIGN.values(), ids=FOREIGN)
def test_foreign_archives(entries, words):
    with pytest.raises(FormatError, match=words):
        opened(archive(entries))


@pytest.mark.parametrize("wide", [False, True], ids=["plain", "zip64"])
def test_every_truncation_is_an_error(wide):
    data = archive(checkpoint(), wide=wide)
    for nbytes in range(1, len(data)):
        with pytest.raises(FormatError):
            opened(data[:nbytes])


def test_every_single_byte_changed():
    """A changed byte is an error, or changes nothing that is read."""
    entries = [Entry(e.name, e.data, align=0, wide=True) for e in checkpoint(STORAGES[:2])]
    data = archive(entries, wide=True)
    expected = contents(opened(data))
    for at in range(len(data)):
        for bits in (0x01, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= bits
            try:
                found = contents(opened(bytes(broken)))
            except CheckpointError:
                continue
            # a name in nobody's use may change, but what is there under its own name is right
            assert all(expected.get(name, content) == content for name, content in found.items()), (
                at
            )


def test_random_damage_never_crashes():
    randomness = random.Random(5)
    data = archive(checkpoint(STORAGES), wide=True)
    marks = (b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4", b"\xff" * 4, b"\0" * 8)
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(randomness.randrange(1, 6)):
            at = randomness.randrange(len(broken))
            mark = randomness.choice(marks)
            broken[at : at + len(mark)] = mark
        try:
            contents(opened(bytes(broken[: randomness.randrange(len(broken) + 1)])))
        except CheckpointError:
            pass
