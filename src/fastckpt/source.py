"""Where bytes come from: a file, memory, or a seekable object, all read by position.

``open_source`` turns whatever a caller has into one of three sources. Each owns what it reads from (one
descriptor, a view of the memory, a lock around the object) from open to close, and its offsets count
from the start of the checkpoint, wherever that lies in the file.
"""

import contextlib
import errno
import io
import mmap
import os
import stat
import threading

from ._descriptor import Owned
from .errors import FormatError


class Source:
    """``nbytes`` bytes that can be read at any offset, from any thread.

    ``name`` stands in messages. Native readers use ``fd`` and ``base`` (where offset 0 lies in the
    descriptor), or ``view`` (a flat memoryview); a source that has neither is read through ``readinto``.
    """

    fd = -1
    base = 0
    view = None
    path = None
    nbytes = 0
    name = "<bytes>"
    closed = False

    def __new__(cls, *args, **kwargs):
        source = super().__new__(cls)
        # Who is reading, and what close() is to let go of. No lock: one that is held while another thread forks
        # stays held in the child. Adding to a list and taking from it are atomic.
        source._readers, source._held = [], [True]
        return source

    def readinto(self, offset, view):
        """Fill a flat writable memoryview from ``offset`` on; FormatError where the source ends first."""
        raise NotImplementedError

    def read(self, offset, nbytes):
        """The bytes ``[offset, offset + nbytes)``, all of them."""
        data = bytearray(nbytes)
        self.readinto(offset, memoryview(data))
        return data

    def check_open(self):
        if self.closed:
            raise ValueError(f"{self.name}: the checkpoint is closed")

    def there(self):
        """How many bytes there are now, as far as that can be asked."""
        return self.nbytes

    def short(self, offset, wanted, got=None):
        """The error for bytes that should be there and are not; ``got`` of them are, None for as many as are left now."""
        if got is None:
            got = max(0, min(wanted, self.there() - offset))
        return FormatError(
            f"{self.name}: {wanted} bytes at byte {offset} are wanted and only {got} are there; "
            f"the file is shorter than the {self.nbytes} bytes it had when it was opened",
            path=self.name,
            offset=offset,
        )

    @contextlib.contextmanager
    def in_use(self):
        """For a with statement in which close(), called by another thread, lets go of nothing.

        A descriptor that was closed and belongs to another file by then would be read as if it were ours.
        """
        mark = object()
        self._readers.append(mark)
        try:
            self.check_open()
            yield
        finally:
            self._readers.remove(mark)
            if self.closed:
                self._let_go()

    def close(self):
        """Read no more. What is read from is let go of at once, or when the last reader is done."""
        self.closed = True
        self._let_go()

    def _let_go(self):
        if not self._readers and self._held:
            try:
                self._held.pop()
            except IndexError:
                return  # another thread was faster
            self._release()

    def _release(self):
        """Give back what is read from."""

    def finish(self, end):
        """Called after a whole load: ``end`` is where the checkpoint ends."""


def region_nbytes(name, there, start, nbytes):
    """How many bytes a region has that begins at ``start`` of ``there``; FormatError where it ends beyond them."""
    left = max(0, there - start)
    if nbytes is None:
        return left
    if nbytes > left:
        raise FormatError(
            f"{name}: {nbytes} bytes from byte {start} on are asked for, {left} are there",
            path=name,
            offset=start,
        )
    return nbytes


class FileSource(Source):
    """A regular file behind a descriptor of our own (``owned``, an Owned), which it closes; nothing seeks in it."""

    def __init__(self, owned, name, path=None, base=0, nbytes=None):
        self._owned, self.fd = owned, owned.fd
        self.name, self.path, self.base = name, path, base
        try:
            self._measure(nbytes)
        except BaseException:
            self.close()
            raise

    def _measure(self, nbytes):
        status = os.fstat(self.fd)
        self.nbytes = region_nbytes(self.name, status.st_size, self.base, nbytes)
        # What tells that a path still leads to the same content, for handles that reopen.
        self.fingerprint = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def readinto(self, offset, view):
        self.check_open()
        done = 0
        while done < len(view):
            got = os.preadv(self.fd, [view[done:]], self.base + offset + done)
            if not got:
                raise self.short(offset, len(view), done)
            done += got

    def there(self):
        return os.fstat(self.fd).st_size - self.base

    def _release(self):
        self.fd = -1
        self._owned.close()

    def __del__(self):
        self.close()


class MemorySource(Source):
    """Bytes that are in memory already: bytes, bytearray, memoryview, mmap, BytesIO."""

    def __init__(self, owner, name="<bytes>", start=0, nbytes=None):
        view = memoryview(owner)
        if not view.c_contiguous:
            raise TypeError(
                f"{name}: a contiguous buffer is needed, this one has gaps; copy it with bytes()"
            )
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self.nbytes = region_nbytes(name, len(view), start, nbytes)
        self.view = view[start : start + self.nbytes]
        self.name = name

    def readinto(self, offset, view):
        self.check_open()
        part = self.view[offset : offset + len(view)]
        if len(part) != len(view):
            raise self.short(offset, len(view), len(part))
        view[:] = part

    def _release(self):
        if self.view is not None:
            self.view.release()
            self.view = None


class _BytesIOSource(MemorySource):
    """A BytesIO, read in place; it cannot change its size until the source is closed."""

    def __init__(self, f, offset, nbytes):
        self.f, self.start = f, f.tell() + offset
        super().__init__(f.getbuffer(), name_of(f), self.start, nbytes)

    def finish(self, end):
        self.f.seek(self.start + end)


class ObjectReader:
    """Reads what a binary file object has for it, through ``readinto`` or ``read``."""

    def __init__(self, f):
        self.f, self.name = f, name_of(f)
        self._readinto = getattr(f, "readinto", None)

    def __call__(self, view):
        """Read up to ``len(view)`` bytes: how many there were (0 at the end), None where there are none yet."""
        if self._readinto is not None:
            try:
                got = self._readinto(view)
            except (NotImplementedError, io.UnsupportedOperation):
                self._readinto = None
            else:
                if got is not None and not 0 <= got <= len(view):
                    raise OSError(
                        errno.EIO,
                        f"readinto() of {len(view)} bytes says that it read {got}",
                        self.name,
                    )
                return got
        data = self.f.read(len(view))
        if data is None:
            return None
        if isinstance(data, str):
            raise text_mode(self.name)
        got = memoryview(data).nbytes
        if got > len(view):
            raise OSError(errno.EIO, f"read({len(view)}) gave {got} bytes", self.name)
        view[:got] = memoryview(data).cast("B")
        return got


def text_mode(name):
    return TypeError(f"{name}: the file is open in text mode; open it with 'rb'")


class ObjectSource(Source):
    """A seekable binary file object (gzip.open, a tar member, an object of your own), one read at a time."""

    # A raw stream may answer None when nothing is ready; a reader that never has anything is broken.
    EMPTY_ANSWERS = 100

    def __init__(self, f, start=0, nbytes=None):
        self.f, self._locks = f, {}
        self.name = name_of(f)
        try:
            self.found_at = f.tell()
            self.start = self.found_at + start
            end = f.seek(0, os.SEEK_END)
            if not isinstance(end, int):
                end = f.tell()
        except (AttributeError, OSError) as error:
            if getattr(f, "closed", False):
                raise ValueError(f"{self.name}: I/O operation on closed file") from None
            raise TypeError(
                f"{self.name}: a {type(f).__name__} that cannot seek; read it into memory first, "
                f"load(io.BytesIO(f.read()))"
            ) from error
        self.nbytes = region_nbytes(self.name, end, self.start, nbytes)
        f.seek(self.start)
        if isinstance(f.read(0), str):
            raise text_mode(self.name)
        self._some = ObjectReader(f)

    def readinto(self, offset, view):
        self.check_open()
        with self._lock():
            self.f.seek(self.start + offset)
            done = empty = 0
            while done < len(view):
                got = self._some(view[done:])
                if got is None and empty < self.EMPTY_ANSWERS:
                    empty += 1
                elif not got:
                    raise self.short(offset, len(view), done)
                else:
                    done += got

    def _lock(self):
        """That of this process: another thread may have held it when a process forked."""
        pid = os.getpid()
        return self._locks.get(pid) or self._locks.setdefault(pid, threading.Lock())

    def finish(self, end):
        self.close()
        self.f.seek(self.start + end)

    def close(self):
        """Leave the object where it was found: so are plain files left where a load fails."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(ValueError, OSError):  # its owner closed it
                self.f.seek(self.found_at)


class _SharedFile(FileSource):
    """A real file object: read by position through a descriptor of our own, its position set at the end."""

    def __init__(self, f, **region):
        super().__init__(Owned(os.dup, f.fileno()), name_of(f), **region)
        self.f = f

    def finish(self, end):
        if not self.f.closed:
            self.f.seek(self.base + end)


def name_of(f):
    """How messages call a file object."""
    name = getattr(f, "name", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes)) and name else f"<{type(f).__name__}>"


def plain_file(f):
    """The object behind a wrapper where it reads a descriptor as it is (not gzip, not a tar member), else None."""
    if isinstance(f, io.IOBase) is False and hasattr(f, "file") and hasattr(f, "delete"):
        f = f.file  # tempfile.NamedTemporaryFile
    raw = f.raw if type(f) in (io.BufferedReader, io.BufferedRandom) else f
    return f if type(raw) is io.FileIO and not f.closed and f.readable() else None


def open_path(path, offset, nbytes):
    name = os.fsdecode(path)
    owned = Owned(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    mode = os.fstat(owned.fd).st_mode
    if stat.S_ISREG(mode):
        return FileSource(owned, name, name, offset, nbytes)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISFIFO(mode):
        raise OSError(errno.EINVAL, "not a regular file; copy what it holds to one first", name)
    # it can be read once, and only from front to back
    with open(owned.fd, "rb", closefd=False) as pipe:
        data = pipe.read()
    return MemorySource(data, name, offset, nbytes)


def check_descriptor(fd):
    """Raise OSError for a number that no descriptor can be."""
    if not 0 <= fd < 1 << 31:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), f"<descriptor {fd}>")


def open_source(f, offset=0, nbytes=None):
    """Turn ``f`` into a Source.

    ``f``: path (str, bytes, PathLike), descriptor (int), bytes-like object, mmap, or binary file object, which
    is read from its current position. ``offset`` and ``nbytes`` narrow it to a region.
    Raises TypeError for anything else, OSError where the system refuses.
    """
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise ValueError(f"offset={offset}, nbytes={nbytes}: neither may be negative")
    if isinstance(f, (str, os.PathLike)) or type(f) is bytes and is_path(f):
        return open_path(os.fspath(f), offset, nbytes)
    if isinstance(f, int) and not isinstance(f, bool):
        check_descriptor(f)
        if not stat.S_ISREG(os.fstat(f).st_mode):
            raise OSError(
                errno.ESPIPE,
                "the descriptor is not of a regular file; read it into memory first",
                f,
            )
        return FileSource(Owned(os.dup, f), f"<descriptor {f}>", None, offset, nbytes)
    if isinstance(f, (bytes, bytearray, memoryview, mmap.mmap)):
        return MemorySource(f, f"<{type(f).__name__}>", offset, nbytes)
    if type(f) is io.BytesIO and not f.closed:
        return _BytesIOSource(f, offset, nbytes)
    if not hasattr(f, "read"):
        raise TypeError(
            f"a path, descriptor, bytes-like object or binary file object is needed, not {type(f).__name__}"
        )
    if (plain := plain_file(f)) is not None and stat.S_ISREG(os.fstat(plain.fileno()).st_mode):
        if hasattr(plain, "flush"):
            plain.flush()
        return _SharedFile(plain, base=plain.tell() + offset, nbytes=nbytes)
    return ObjectSource(f, offset, nbytes)


def is_path(data):
    """bytes are a path when they can be one and do not begin like a checkpoint."""
    return (
        0 < len(data) < 4096
        and b"\0" not in data
        and data[:2] not in (b"PK", b"\x80\x02")
        and os.path.lexists(data)
    )
