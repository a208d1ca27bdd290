"""Tar files, as torch.save wrote them until 0.1.9: which members there are, and where. Nothing is unpacked.

Understands what ustar, GNU and PAX writers do to the name and the size of a member, and nothing else.
"""

from .. import _tar
from ..errors import FormatError, UnsupportedError
from ._zip_contents import CHECKPOINT_SUFFIXES, listed

# The members of a checkpoint; the first is never needed.
MEMBERS = ("sys_info", "pickle", "tensors", "storages")
NEEDED = MEMBERS[1:]

# A name or a PAX header takes one block, rarely two; a megabyte of it is no name.
MOST_HEADER_NBYTES = 1 << 20

FILE_TYPES = (b"0", b"\0", b"7")
GNU_LONG_NAME, GNU_LONG_LINK, PAX, PAX_GLOBAL, GNU_SPARSE = b"L", b"K", b"x", b"g", b"S"
# Links, devices, folders: their size, if they have one, is not followed by data.
WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")


def checkpoint_members(source):
    """Find the members of a tar checkpoint: name -> (offset, nbytes).

    Raises FormatError where one of ``NEEDED`` is missing, and says what the tar holds instead.
    """
    members = tar_members(source)
    missing = [name for name in NEEDED if name not in members]
    if not missing:
        return {name: members[name] for name in MEMBERS if name in members}
    inside = [name for name in members if name.lower().endswith(CHECKPOINT_SUFFIXES)]
    if inside:
        message = (
            f"a tar archive that contains {listed(inside)}; unpack it first, then load that file"
        )
    elif len(missing) < len(NEEDED):
        message = f"a tar checkpoint without its member {missing[0]!r}; the file is incomplete"
    elif members:
        message = (
            f"a tar archive that holds {listed(list(members))}; a checkpoint has {listed(NEEDED)}"
        )
    else:
        message = "an empty tar archive"
    raise FormatError(f"{source.name}: {message}", path=source.name)


def is_of_something_else(source):
    """Whether a tar, whole as it is, has nothing of a checkpoint."""
    try:
        return not any(name in NEEDED for name in tar_members(source))
    except FormatError:
        return False


def tar_members(source, members=None):
    """Walk a tar: name -> (offset, nbytes) of every file in it, a leading "./" taken off.

    Raises FormatError for damage, truncation and for a member of a checkpoint that is there twice; what was found until then
    is in ``members``, where that is given, with the last one as long as it should be.
    """
    members = {} if members is None else members
    offset, everywhere, here = 0, {}, {}
    while offset < source.nbytes:
        header = _read_header(source, offset)
        if header is False:
            break  # the end; the rest is padding
        name, kind, nbytes = header
        offset += _tar.BLOCK
        if kind in (PAX, PAX_GLOBAL):
            (here if kind == PAX else everywhere).update(_pax(source, offset, nbytes))
        elif kind == GNU_LONG_NAME:
            here["path"] = bytes(_content(source, offset, nbytes)).partition(b"\0")[0]
        elif kind != GNU_LONG_LINK:
            told = {**everywhere, **here}
            name, nbytes = told.get("path", name), told.get("size", nbytes)
            here = {}
            if kind in WITHOUT_DATA:
                nbytes = 0
            else:
                _add(source, members, name, kind, offset, nbytes)
        if nbytes > source.nbytes - offset:
            raise _error(
                source,
                offset,
                f"{nbytes} bytes of {_shown(name)} follow here, {source.nbytes - offset} are there",
                cut=True,
            )
        offset += nbytes + -nbytes % _tar.BLOCK
    return members


def _read_header(source, offset):
    if source.nbytes - offset < _tar.BLOCK:
        rest = source.read(offset, source.nbytes - offset)
        if not any(rest):
            return False
        raise _error(
            source,
            offset,
            f"a header of {_tar.BLOCK} bytes should follow, {len(rest)} are there",
            cut=True,
        )
    header = _tar.header(source.read(offset, _tar.BLOCK))
    if header is None:
        raise _error(
            source, offset, "a header should stand here, its checksum or its size is wrong"
        )
    return header


def _add(source, members, name, kind, offset, nbytes):
    """Note a member. What is not a file is no member, except that one of ours must be one."""
    name = name.decode("utf-8", "surrogateescape")
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    if name not in MEMBERS:
        if kind in FILE_TYPES and not name.endswith("/"):
            name = f"{name} at byte {offset}" if name in members else name
            members[name] = offset, nbytes
        return
    if kind not in FILE_TYPES:
        raise UnsupportedError(
            f"{source.name}: tar member {name!r} at byte {offset} is of type {kind!r}, a plain file is needed; "
            f"pack it again without --sparse",
            path=source.name,
            record=name,
            offset=offset,
        )
    if name in members:
        raise _error(
            source, offset, f"a second member {name!r}, and readers differ in which one they take"
        )
    members[name] = (offset, nbytes)


def _content(source, offset, nbytes):
    """The bytes of a header that continues in blocks of its own."""
    if nbytes > MOST_HEADER_NBYTES:
        raise _error(
            source, offset, f"a header of {nbytes} bytes, {MOST_HEADER_NBYTES} are possible"
        )
    if nbytes > source.nbytes - offset:
        raise _error(
            source,
            offset,
            f"a header of {nbytes} bytes follows, {source.nbytes - offset} are there",
            cut=True,
        )
    return source.read(offset, nbytes)


def _pax(source, offset, nbytes):
    """The path and the size from a PAX header, which is lines of "LENGTH KEY=VALUE\\n"."""
    told = {}
    rest = bytes(_content(source, offset, nbytes)).rstrip(b"\0")
    while rest:
        digits = rest.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        line = rest[len(digits) + 1 : length]
        key, equals, value = line[:-1].partition(b"=")
        if length > len(rest) or not equals or line[-1:] != b"\n":
            raise _error(
                source, offset, "a PAX header that does not consist of 'length key=value' lines"
            )
        if key == b"path":
            told["path"] = value
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise _error(source, offset, f"a PAX header gives {value[:20]!r} as size")
            told["size"] = int(value)
        rest = rest[length:]
    return told


def _shown(name):
    return repr(name.decode("utf-8", "replace")) if name else "a member without name"


def _error(source, offset, problem, *, cut=False):
    return FormatError(
        f"{source.name}: tar archive, byte {offset}: {problem}; the file is {'truncated' if cut else 'damaged'}",
        cut=cut,
        path=source.name,
        offset=offset,
    )
