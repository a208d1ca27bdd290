"""Where bytes go: a path that is replaced in one step, an open file, or anything with ``write``.

The twin of source. A Destination with a descriptor (``fd``) takes bytes by position, from ``base`` on; any other takes them
in their order. ``commit`` makes what was written count, ``abort`` leaves things as they were, as far as that can be.
"""

import contextlib
import errno
import io
import os
import secrets
import stat

from .source import name_of

# A raw stream may answer that it takes nothing now; one that never does is broken.
EMPTY_ANSWERS = 100


def open_destination(f, fsync=False):
    """A Destination for what a caller gives: a path (str, bytes, PathLike), a descriptor, or an object with ``write``.

    Raises TypeError for anything else, OSError where the system refuses.
    """
    if isinstance(f, int) and not isinstance(f, bool):
        return open_file(f, f"descriptor {f}", fsync)
    if isinstance(f, (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(f))
        try:
            regular = stat.S_ISREG(os.stat(path).st_mode)
        except FileNotFoundError:
            regular = True
        return Replacement(path, fsync) if regular else InPlace(path, fsync)
    if not hasattr(f, "write"):
        raise TypeError(f"f is a {type(f).__name__}: a path or a binary file object is expected")
    plain = writable_file(f)
    return open_file(f.fileno(), name_of(f), fsync, f) if plain else Stream(f)


class Destination:
    """What all have: ``fd`` (-1: takes bytes in order only), ``base``, ``name`` for messages, ``path`` where it has one."""

    fd, base, path = -1, 0, None

    def write(self, data):
        """Take all of ``data``, behind what was written so far."""
        raise NotImplementedError

    def commit(self, nbytes):
        """``nbytes`` were written in all, and count now."""

    def abort(self):
        """Nothing that was written counts."""


class Replacement(Destination):
    """A file that takes the place of ``path`` when it is whole, with the permissions of what was there.

    It has no name until then, where the system can do that, so that not even a killed process leaves one behind.
    """

    def __init__(self, path, fsync):
        self.path = self.name = path
        self.fsync, self.folder = fsync, os.path.dirname(path) or "."
        self.temporary = None
        self.fd = self._open()
        try:
            self._take_over_permissions()
        except BaseException:
            self.abort()
            raise

    def _open(self):
        with contextlib.suppress(OSError, AttributeError):  # not every system or file system can
            os.stat("/proc/self/fd")  # where it gets its name from
            return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self.temporary = self._fresh_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(self.temporary, flags, 0o666)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path) from None

    def _fresh_name(self):
        return os.path.join(
            self.folder, f".{os.path.basename(self.path)[:200]}.{secrets.token_hex(6)}"
        )

    def _take_over_permissions(self):
        with contextlib.suppress(FileNotFoundError):
            there = os.stat(self.path)
            with contextlib.suppress(PermissionError):  # only its owner's to give
                os.fchown(self.fd, there.st_uid, there.st_gid)
            os.fchmod(self.fd, stat.S_IMODE(there.st_mode))

    def commit(self, nbytes):
        if self.fsync:
            os.fsync(self.fd)
        if self.temporary is None:
            name = self._fresh_name()
            give_name(self.fd, name)
            self.temporary = name
        os.replace(self.temporary, self.path)
        self.temporary = None
        self._close()
        if self.fsync:
            sync_folder(self.folder)

    def abort(self):
        if self.temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
            self.temporary = None
        self._close()

    def _close(self):
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def give_name(fd, name):
    """Give a file that has no name one."""
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a folder's descriptor Python calls linkat, which can follow the link that /proc has there.
        os.link(str(fd), name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def sync_folder(folder):
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class OpenFile(Destination):
    """A regular file that is open already: written from its position on, which is moved behind the end."""

    def __init__(self, fd, name, fsync, f=None):
        self.name, self.fsync, self.f = name, fsync, f
        if f is not None:
            f.flush()
        self.base = os.lseek(fd, 0, os.SEEK_CUR)
        self.fd = fd

    def commit(self, nbytes):
        if self.fsync:
            os.fsync(self.fd)
        if self.f is None:
            os.lseek(self.fd, self.base + nbytes, os.SEEK_SET)
        else:
            self.f.seek(self.base + nbytes)


class Pipe(Destination):
    """A descriptor that is written in order: a pipe, a socket, a terminal."""

    def __init__(self, fd, name):
        self.descriptor, self.name = fd, name

    def write(self, data):
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.descriptor, view) :]


class InPlace(Pipe):
    """A path that is no regular file: /dev/stdout, a named pipe."""

    def __init__(self, path, fsync):
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        super().__init__(os.open(path, os.O_WRONLY | os.O_CLOEXEC), path)

    def commit(self, nbytes):
        self.abort()

    def abort(self):
        if self.descriptor >= 0:
            fd, self.descriptor = self.descriptor, -1
            os.close(fd)


class Stream(Destination):
    """Anything with ``write``: BytesIO, gzip.open, a socket's file."""

    def __init__(self, f):
        self.f, self.name = f, name_of(f)

    def write(self, data):
        view, empty = memoryview(data).cast("B"), 0
        while view:
            taken = self.f.write(view)
            if taken is None and isinstance(self.f, io.RawIOBase):  # it would have to wait
                taken, empty = 0, empty + 1
                if empty == EMPTY_ANSWERS:
                    raise BlockingIOError(errno.EAGAIN, "the stream takes nothing", self.name)
            elif taken:
                empty = 0
            view = view[len(view) if taken is None else taken :]

    def commit(self, nbytes):
        if hasattr(self.f, "flush"):
            self.f.flush()


def open_file(fd, name, fsync, f=None):
    """A descriptor: by position where it is a regular file that is not open for appending."""
    import fcntl

    appends = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
    if stat.S_ISREG(os.fstat(fd).st_mode) and not appends:
        return OpenFile(fd, name, fsync, f)
    return Pipe(fd, name) if f is None else Stream(f)


def writable_file(f):
    """Whether an object writes a descriptor as it is (not gzip, not a wrapper that encrypts)."""
    if isinstance(f, io.IOBase) is False and hasattr(f, "file") and hasattr(f, "delete"):
        f = f.file  # tempfile.NamedTemporaryFile
    raw = f.raw if type(f) in (io.BufferedWriter, io.BufferedRandom) else f
    return type(raw) is io.FileIO and not f.closed and f.writable()
