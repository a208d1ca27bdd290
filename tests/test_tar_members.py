"""Members of tar files: where they are, and what is refused."""

import io
import random
import tarfile

import pytest

from fastckpt import _tar
from fastckpt.containers._tar_members import checkpoint_members, tar_members
from fastckpt.errors import CheckpointError, FormatError, UnsupportedError
from fastckpt.source import open_source

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}
MEMBERS = {"sys_info": b"s" * 10, "pickle": b"p" * 512, "tensors": b"", "storages": b"x" * 1500}


def packed(members, form=tarfile.PAX_FORMAT, **fields):
    """A tar of names and bytes; a TarInfo in place of bytes stands as it is."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(info, field, value)
            if isinstance(data, bytes):
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return out.getvalue()


def special(name, kind):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "elsewhere"
    return info


def content(data, find=checkpoint_members):
    return {name: data[at : at + n] for name, (at, n) in find(open_source(data)).items()}


GOOD = packed(MEMBERS.items())


def resealed(data, at, field):
    """A tar whose first header has other bytes at ``at``, and a checksum that says so."""
    block = bytearray(data[:512])
    block[at : at + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
class TestGood:
    def test_members(self, form):
        assert content(packed(MEMBERS.items(), form)) == MEMBERS

    def test_dot_slash(self, form):
        assert content(packed([(f"./{n}", d) for n, d in MEMBERS.items()], form)) == MEMBERS

    def test_any_order_and_more(self, form):
        more = [
            ("readme", b"hi"),
            ("folder", special("folder", tarfile.DIRTYPE)),
            ("l", special("l", tarfile.SYMTYPE)),
        ]
        assert content(packed([*more, *reversed(MEMBERS.items())], form)) == MEMBERS

    def test_long_names(self, form):
        name = "a" * 90 + "/" + "b" * 90
        found = content(packed([(name, b"12"), *MEMBERS.items()], form), tar_members)
        assert found == {name: b"12", **MEMBERS}

    def test_other_names(self, form):
        name = "модель/ü" if form != tarfile.USTAR_FORMAT else "model/u"
        assert content(packed([(name, b"1")], form), tar_members) == {name: b"1"}

    def test_no_padding_at_the_end(self, form):
        data = packed(MEMBERS.items(), form)
        end = data.rindex(b"x") + 1
        assert content(data[:end]) == MEMBERS
        assert content(data[:end] + bytes(-end % 512) + bytes(100)) == MEMBERS


def test_sizes_in_base_256():
    size = b"\x80" + (10).to_bytes(11, "big")
    assert content(resealed(GOOD, 124, size)) == MEMBERS


def test_a_size_in_a_pax_header():
    data = packed([("storages", b"x" * 100)], pax_headers={"size": "100"})
    assert content(data, tar_members) == {"storages": b"x" * 100}


def test_old_headers_have_no_prefix():
    data = resealed(resealed(GOOD, 345, b"prefix"), 257, b"\0" * 8)
    assert content(data) == MEMBERS


BROKEN = {
    "cut in a member": (GOOD[:2000], "truncated"),
    "cut in a header": (GOOD[: 1024 + 100], "truncated"),
    "checksum": (GOOD[:1024] + b"?" + GOOD[1025:], "byte 1024: a header should stand here"),
    "size of letters": (resealed(GOOD, 124, b"12x"), "header should stand here"),
    "size below zero": (resealed(GOOD, 124, b"\xff" * 12), "header should stand here"),
    "size of 2**80": (resealed(GOOD, 124, b"\x80\1" + bytes(10)), "header should stand here"),
    "size of 2**62": (resealed(GOOD, 124, b"\x80\0\0\0\x40" + bytes(7)), "4611686018427387904 bytes of 'sys_info'"),
    "size of 2**63-1": (resealed(GOOD, 124, b"\x80\0\0\0\x7f" + b"\xff" * 7), "bytes of 'sys_info'"),
    "a member twice": (packed([*MEMBERS.items(), ("./tensors", b"other")]), "second member 'tensors'"),
    "no storages": (packed(list(MEMBERS.items())[:3]), "without its member 'storages'"),
    "a model inside": (packed([("release/model.pth", b"1")]), "contains 'release/model.pth'; unpack it first"),
    "a folder up": (packed([(f"../{n}", d) for n, d in MEMBERS.items()]), r"holds '\.\./sys_info'"),
    "other things": (packed([("a.txt", b"1")]), "holds 'a.txt'"),
    "nothing": (bytes(1024), "empty tar"),
    "PAX, no lines": (packed([("x" * 200, b"")]).replace(b"path=", b"path:"), "length key=value"),
    "PAX, size": (packed([("a", b"")], pax_headers={"size": "-5"}), "b'-5' as size"),
    "PAX, huge": (resealed(packed([("x" * 200, b"")]), 124, b"77777777777\0"), "are possible"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "words"), BROKEN.values(), ids=BROKEN)
def test_broken(data, words):
    with pytest.raises(FormatError, match=words) as caught:
        content(data)
    assert caught.value.path == "<bytes>"


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_members_that_are_no_files(kind):
    data = packed([*list(MEMBERS.items())[:3], ("storages", special("storages", kind))])
    with pytest.raises(CheckpointError, match="storages"):
        content(data)


def test_sparse_members_are_unsupported():
    with pytest.raises(UnsupportedError, match="without --sparse"):
        content(packed([("storages", special("storages", tarfile.GNUTYPE_SPARSE))]))


def test_every_truncation():
    """A cut is seen, unless it only takes the padding away."""
    needed = GOOD.rindex(b"x") + 1
    for nbytes in range(1, needed):
        with pytest.raises(FormatError):
            content(GOOD[:nbytes])
    for nbytes in range(needed, len(GOOD), 50):
        assert content(GOOD[:nbytes]) == MEMBERS


def test_random_damage_never_crashes():
    randomness = random.Random(3)
    data = packed([("x" * 200, b"1"), *MEMBERS.items()])
    for _ in range(2000):
        broken = bytearray(data)
        for _ in range(randomness.randrange(1, 4)):
            broken[randomness.randrange(4096)] = randomness.randrange(256)
        try:
            content(resealed(bytes(broken), 0, b""))
        except CheckpointError:
            pass


def test_header_wants_a_block():
    with pytest.raises(ValueError, match="512"):
        _tar.header(b"x" * 511)
    assert _tar.header(bytes(512)) is False
    assert _tar.header(b"x" * 512) is None
