"""Where bytes go: a path that is replaced in one step, an open file, or anything with ``write``.

The twin of source. A Destination with a descriptor (``fd``) takes bytes by position, from ``base`` on; any other takes them
in their order. ``commit`` makes what was written count, ``abort`` leaves things as they were, as far as that can be.
"""

import contextlib
import errno
import io
import os
import re
import secrets
import select
import stat

from ._descriptor import Owned
from .importing import importing
from .source import check_descriptor, name_of

# Linux's folders of descriptors, and the one of systems without /proc.
OWN_DESCRIPTORS = re.compile(r"/proc/\d+/(task/\d+/)?fd|/dev/fd")
MOST_LINKS = 40  # as many as Linux follows
EFFECTIVE_IDS = os.access in os.supports_effective_ids


def open_destination(f, fsync=False):
    """A Destination for what a caller gives: a path (str, bytes, PathLike), a descriptor, or an object with ``write``.

    Raises TypeError for anything else, OSError where the system refuses.
    """
    if isinstance(f, int) and not isinstance(f, bool):
        check_descriptor(f)
        return open_file(f, f"descriptor {f}", fsync)
    if isinstance(f, (str, bytes, os.PathLike)):
        return open_path(os.fsdecode(f), fsync)
    if not hasattr(f, "write"):
        raise TypeError(f"f is a {type(f).__name__}: a path or a binary file object is expected")
    if isinstance(getattr(f, "file", f), io.TextIOBase):
        raise TypeError(f"{name_of(f)}: the file is open in text mode; open it with 'wb'")
    plain = writable_file(f)
    return open_file(f.fileno(), name_of(f), fsync, f) if plain else Stream(f)


def open_path(path, fsync):
    """A file that is replaced, or what has to be written where it is: a pipe, a device, a descriptor of ours by its path."""
    fd = descriptor_behind(path)
    if fd is not None:
        check_descriptor(fd)
        return open_file(fd, path, fsync)
    try:
        there = os.stat(path)
    except FileNotFoundError:
        if not path:
            raise
        if not os.path.basename(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
        return Replacement(path, os.path.realpath(path), fsync)
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    target = os.path.realpath(path)
    # Another process's descriptor may lead to a file that was deleted, by a name that is none.
    if stat.S_ISREG(there.st_mode) and os.path.exists(target) and os.path.samefile(path, target):
        return Replacement(path, target, fsync)
    return InPlace(path)


def descriptor_behind(path):
    """The number of our descriptor that a path stands for, as /dev/stdout and /proc/self/fd/1 do; None for other paths.

    A file that got the place of one that somebody holds open would be another file, which they do not see.
    """
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        path = os.path.join(folder, name)
        if OWN_DESCRIPTORS.fullmatch(folder) and name.isdecimal():
            return int(name) if folder == "/dev/fd" or f"/{os.getpid()}/" in folder else None
        try:
            path = os.path.join(folder, os.readlink(path))
        except OSError:  # no link, or nothing
            return None
    return None


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


@contextlib.contextmanager
def naming(name):
    """Give an OSError that names no file this name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = name
        raise


class Replacement(Destination):
    """A file that takes the place of ``target`` when it is whole, with the permissions of what was there.

    ``path`` is how the caller calls it, and may be a link. The file has no name until it is whole, where the system can do
    that: a process that is killed leaves none behind, unless in the instant between its having a name and its having this one.
    With ``exclusive`` it takes nobody's place: FileExistsError where there is a file by then.
    """

    def __init__(self, path, target, fsync, exclusive=False):
        if not path:  # whose real path is the folder that we are in
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.path = self.name = path
        self.target, self.fsync, self.folder = target, fsync, os.path.dirname(target)
        self.exclusive = exclusive
        self.temporary, self.owned, self.pid = None, None, os.getpid()
        if os.path.exists(target) and not os.access(target, os.W_OK, effective_ids=EFFECTIVE_IDS):
            raise PermissionError(
                errno.EACCES,
                f"{os.strerror(errno.EACCES)}: it is there, and not to be written",
                path,
            )
        try:
            self.owned = self._open()
            self.fd = self.owned.fd
            self._take_over_permissions()
        except BaseException:
            self.abort()
            raise

    def _open(self):
        with contextlib.suppress(OSError, AttributeError):  # not every system or file system can
            os.stat("/proc/self/fd")  # where it gets its name from
            return Owned(os.open, self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self.temporary = self._fresh_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return Owned(os.open, self.temporary, flags, 0o666)
        except OSError as error:
            message = f"{error.strerror}: a new file has to be made in its folder"
            raise type(error)(error.errno, message, self.path) from None

    def _fresh_name(self):
        name = os.fsdecode(os.fsencode(os.path.basename(self.target))[:200])
        return os.path.join(self.folder, f".{name}.{secrets.token_hex(6)}")

    def _take_over_permissions(self):
        try:
            there = os.stat(self.target)
        except FileNotFoundError:
            return
        mode = there.st_mode & 0o777
        try:
            os.fchown(self.fd, there.st_uid, there.st_gid)
        except PermissionError:  # only its owner's to give, and only to groups of theirs
            try:
                os.fchown(self.fd, -1, there.st_gid)
            except PermissionError:
                mode = mode & 0o707 | (mode & 0o007) << 3  # another group may do what all may
        os.fchmod(self.fd, mode)

    def commit(self, nbytes):
        with naming(self.name):
            if self.fsync:
                os.fsync(self.fd)
        with durable_names([self.folder] if self.fsync else ()):
            try:
                if self.temporary is not None or not self._take_free_name():
                    self._move()
            except OSError as error:
                # The names in it may be a descriptor's number, or of a file that is gone by now.
                raise type(error)(error.errno, error.strerror, self.path) from None
            self.temporary = None
            self._close()

    def _take_free_name(self):
        """Give the file the name of the target if nothing has it, else one that can be renamed, and say which."""
        try:
            give_name(self.fd, self.target)
            return True
        except FileExistsError:
            if self.exclusive:
                raise
            self.temporary = (
                self._fresh_name()
            )  # before there is one, which abort would not know of
            give_name(self.fd, self.temporary)
            return False

    def _move(self):
        """Give a file that has a name the one that it is to have."""
        if self.exclusive:
            try:
                os.link(self.temporary, self.target)
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                check_new(self.target)
            else:
                os.unlink(self.temporary)
                return
        os.replace(self.temporary, self.target)

    def abort(self):
        if self.temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)
            self.temporary = None
        with contextlib.suppress(OSError):
            self._close()

    def _close(self):
        self.fd = -1
        if self.owned is not None:
            with naming(self.name):
                self.owned.close()

    def __del__(self):
        # Whoever was interrupted between making this and holding it. A child that was forked has nothing to give up.
        if getattr(self, "pid", None) == os.getpid():
            self.abort()


def check_new(path):
    """Raise FileExistsError where a file is."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def write_at(fd, offset, data, name):
    """Write all of bytes-like ``data`` at byte ``offset`` of a descriptor; an OSError has the ``name``."""
    view = memoryview(data).cast("B")
    with naming(name):
        while view:
            done = os.pwrite(fd, view, offset)
            offset, view = offset + done, view[done:]


def give_name(fd, name):
    """Give a file that has no name one."""
    folder = Owned(os.open, "/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # With a folder's descriptor Python calls linkat, which can follow the link that /proc has there.
    os.link(str(fd), name, src_dir_fd=folder.fd, follow_symlinks=True)


@contextlib.contextmanager
def durable_names(folders):
    """Make the names durable that are given in ``folders`` meanwhile; OSError before where one can't be opened."""
    owned = [Owned(os.open, folder, os.O_RDONLY | os.O_CLOEXEC) for folder in folders]
    yield
    for each in owned:
        os.fsync(each.fd)


class OpenFile(Destination):
    """A regular file that is open already: written from its position on, which is moved behind the end."""

    def __init__(self, fd, name, fsync, f=None):
        self.name, self.fsync, self.f = name, fsync, f
        self.base = os.lseek(fd, 0, os.SEEK_CUR)
        self.fd = fd

    def commit(self, nbytes):
        if self.fsync:
            with naming(self.name):
                os.fsync(self.fd)
        if self.f is None:
            os.lseek(self.fd, self.base + nbytes, os.SEEK_SET)
        else:
            self.f.seek(self.base + nbytes)


class Pipe(Destination):
    """A descriptor that is written in order: a pipe, a socket, a terminal; one that does not block is waited for."""

    def __init__(self, fd, name):
        self.descriptor, self.name = fd, name

    def write(self, data):
        view = memoryview(data).cast("B")
        with naming(self.name):
            while view:
                try:
                    view = view[os.write(self.descriptor, view) :]
                except BlockingIOError:
                    wait_to_write(self.descriptor)


class InPlace(Pipe):
    """A path that is no file which another could replace: /dev/stdout, a named pipe."""

    def __init__(self, path):
        super().__init__(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC), path)

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
        view = memoryview(data).cast("B")
        while view:
            try:
                taken = self.f.write(view)
            except BlockingIOError as error:
                self._wait(error)
                view = view[error.characters_written :]
                continue
            if taken is None and isinstance(self.f, io.RawIOBase):  # it would have to wait
                wait_to_write(self.f.fileno())
                continue
            if taken is None:  # a write that says nothing takes all
                return
            if not 0 < taken <= len(view):
                message = f"write() of {len(view)} bytes says that it took {taken}"
                raise OSError(errno.EIO, message, self.name)
            view = view[taken:]

    def _wait(self, error):
        """Wait where a buffer is full and its descriptor does not wait. Other objects don't say what they took of the data."""
        buffered = type(self.f) in (io.BufferedWriter, io.BufferedRandom)
        if not buffered or not hasattr(error, "characters_written"):
            raise error
        wait_to_write(self.f.fileno())

    def flush(self):
        """Let what is written go."""
        while hasattr(self.f, "flush"):
            try:
                return self.f.flush()
            except BlockingIOError as error:
                self._wait(error)

    def commit(self, nbytes):
        self.flush()


def wait_to_write(fd):
    """Wait until a descriptor takes bytes, or its other end is gone."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def open_file(fd, name, fsync, f=None):
    """A descriptor, and the file object ``f`` that it belongs to, if any: by position where it is a regular file."""
    with importing:
        import fcntl

    if f is not None:
        f.flush()
    regular = stat.S_ISREG(os.fstat(fd).st_mode)
    if regular and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
        return OpenFile(fd, name, fsync, f)
    # A file object counts what is appended through it.
    return Stream(f) if regular and f is not None else Pipe(fd, name)


def writable_file(f):
    """Whether an object writes a descriptor as it is (not gzip, not a wrapper that encrypts)."""
    if isinstance(f, io.IOBase) is False and hasattr(f, "file") and hasattr(f, "delete"):
        f = f.file  # tempfile.NamedTemporaryFile
    raw = f.raw if type(f) in (io.BufferedWriter, io.BufferedRandom) else f
    return type(raw) is io.FileIO and not f.closed and f.writable()
