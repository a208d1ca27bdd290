"""The two ends of a stream: an Inlet that bytes come out of, an Outlet that they go into.

A descriptor (of a pipe, a socket, a file that is not buffered) is read and written natively, straight from and to the memory
of tensors; anything else through its own methods, since it may buffer or encrypt. Neither end takes a byte too many.
"""

import contextlib
import errno
import fcntl
import io
import os
import select
import socket
import stat
import sys

from .._descriptor import Owned
from .._flow import ENDED
from ..destination import Stream, naming
from ..errors import FormatError
from ..source import ObjectReader, check_descriptor, name_of

# What is read at first of something that says how long it is; then as much again as has arrived.
FIRST_STEP = 64 << 10
PIPE_NBYTES = 1 << 20  # the most that Linux grants anybody by default
WAITS = (errno.EAGAIN, errno.EWOULDBLOCK)


class EmptyStreamError(FormatError, EOFError):
    """The stream has ended before it began: the other side closed it, and everything before was whole."""


def widen(fd):
    """Let a pipe hold a mebibyte where the system grants that: each time it is full or empty, one side waits for the other."""
    if hasattr(fcntl, "F_SETPIPE_SZ") and stat.S_ISFIFO(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < PIPE_NBYTES:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)


class Descriptor:
    """A descriptor to read or write. One that would have to wait is waited for, a socket as long as its timeout says.

    It is a duplicate: whoever closes the caller's meanwhile, and opens a file that gets its number, has nothing written into that.
    """

    def __init__(self, fd, name, owner=None, timeout=None):
        self.name, self.owner = name, owner
        self.timeout = timeout or None  # a socket that never waits (0) has to, here
        with naming(name):
            self._owned = Owned(os.dup, fd)
        widen(self.fd)

    @property
    def fd(self):
        return self._owned.fd

    def close(self):
        self._owned.close()

    def check_open(self):
        """Raise OSError where the object that it is of was closed."""
        if self.owner is not None and (
            self.owner.closed if isinstance(self.owner, io.FileIO) else self.owner.fileno() < 0
        ):
            raise OSError(errno.EBADF, "it was closed meanwhile", self.name)

    def wait_again(self, event):
        """Wait after a call of the system that did not, or has given up."""
        if os.get_blocking(self.fd):  # it has waited, as long as SO_RCVTIMEO or SO_SNDTIMEO says
            raise TimeoutError("timed out")
        self.wait(event)

    def wait(self, event):
        poll = select.poll()
        poll.register(self.fd, event)
        if not poll.poll(None if self.timeout is None else self.timeout * 1000):
            raise TimeoutError("timed out")  # in the words of socket

    def check(self, status, event):
        """Wait, or raise, after a call that ended with an errno; a signal's handler has run by now."""
        if status in WAITS:
            self.wait_again(event)
        elif status and status != errno.EINTR:
            raise OSError(status, os.strerror(status), self.name)
        self.check_open()


def descriptor_of(f):
    """The Descriptor of what reads and writes one as it is; None for any other object."""
    if isinstance(f, int) and not isinstance(f, bool):
        check_descriptor(f)
        return Descriptor(f, f"<descriptor {f}>")
    if type(f) is socket.socket:
        return Descriptor(f.fileno(), "<socket>", f, f.gettimeout())
    if type(f) is io.FileIO:
        return Descriptor(f.fileno(), name_of(f), f)
    return None


def patient(f, call, event):
    """A call of a socket, made again where it would have had to wait for ``event``, or for what TLS wants first."""

    def patiently(data):
        while True:
            try:
                return call(data)
            except BlockingIOError:
                wanted = event
            except OSError as error:
                if (wanted := wanted_by_tls(error)) is None:
                    raise
            Descriptor(f.fileno(), name_of(f)).wait(wanted)

    return patiently


def wanted_by_tls(error):
    """What a TLS socket that never waits has to wait for; None where the error is another one."""
    ssl = sys.modules.get("ssl")  # Python may have been built without
    if ssl is None or not isinstance(error, (ssl.SSLWantReadError, ssl.SSLWantWriteError)):
        return None
    return select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT


def unfit(f, what):
    """The error for what is no end of a stream."""
    advice = ""
    if isinstance(f, (str, bytes, os.PathLike)):
        advice = "; open the path first, open(path, 'rb') or 'wb'"
    return TypeError(
        f"f is a {type(f).__name__}: a descriptor, a socket or a binary file object that can {what} is needed{advice}"
    )


# -- in


class Inlet:
    """Reads a stream from front to back. ``position`` is how many of its bytes were taken."""

    def __init__(self, name):
        self.name, self.position = name, 0
        self._ahead = memoryview(
            b""
        )  # bytes of this stream that were read with what came before them

    def close(self):
        """Let go of what this took for reading. Whose end it is stays open."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _some(self, view):
        """Read up to ``len(view)`` bytes; 0 where the stream has ended."""
        raise NotImplementedError

    def _receive(self, flow, end, tell):
        """Fill a Flow up to segment ``end``; False where the stream has ended."""
        raise NotImplementedError

    def read(self, nbytes, what):
        """The next bytes, all of them; ``what`` they are for the message. Memory is taken as they arrive."""
        data = bytearray()
        while len(data) < nbytes:
            done = len(data)
            data += bytes(min(nbytes - done, max(FIRST_STEP, done)))
            with memoryview(data) as view:
                while done < len(view):
                    got = self._from_ahead(view[done:]) or self._some(view[done:])
                    if not got:
                        raise self.ended(what)
                    self.position += got
                    done += got
        return data

    def unread(self, data):
        """Give back bytes that belong to what comes next."""
        self._ahead = memoryview(bytes(data))
        self.position -= len(data)

    def _from_ahead(self, view):
        n = min(len(view), len(self._ahead))
        view[:n], self._ahead = self._ahead[:n], self._ahead[n:]
        return n

    def receive(self, flow, end, what, tell=None):
        """Fill a Flow up to segment ``end``. ``what(row)`` names a segment for the message."""
        start = flow.done
        try:
            whole = True
            while self._ahead and (place := flow.place(end)) is not None:
                flow.filled(self._from_ahead(place))
            whole = self._receive(flow, end, tell)
        finally:
            self.position += flow.done - start
        if not whole:
            raise self.ended(what(flow.row))

    def ended(self, what):
        """The error for a stream that ends too early."""
        kind, advice = FormatError, "the sender stopped early, or the connection broke"
        if self.position == 0:
            kind, advice = EmptyStreamError, "the other side has closed it and sends no more"
        return kind(
            f"{self.name}: the stream ends at byte {self.position}, in {what}; {advice}",
            path=self.name,
            offset=self.position,
        )


class DescriptorInlet(Inlet):
    def __init__(self, descriptor):
        super().__init__(descriptor.name)
        self.descriptor = descriptor

    def close(self):
        self.descriptor.close()

    def _some(self, view):
        while True:
            try:
                got = os.readv(self.descriptor.fd, [view])
            except BlockingIOError:
                self.descriptor.wait_again(select.POLLIN)
                continue
            self.descriptor.check_open()
            return got

    def _receive(self, flow, end, tell):
        while flow.row < end:
            status = flow.receive(self.descriptor.fd, end)
            if status == ENDED:
                return False
            self.descriptor.check(status, select.POLLIN)
            if tell:
                tell(flow.done)
        return True


class ObjectInlet(Inlet):
    """``reader(view)`` gives how many bytes it has put there, None where it would have to wait."""

    def __init__(self, f, reader):
        super().__init__(name_of(f))
        self.f, self.reader = f, reader

    def _some(self, view):
        while (got := self.reader(view)) is None:
            self._wait()
        return got

    def _wait(self):
        try:
            fd = self.f.fileno()
        except (AttributeError, OSError):
            raise BlockingIOError(
                errno.EAGAIN, "the stream has nothing now, and no descriptor to wait for", self.name
            ) from None
        Descriptor(fd, self.name).wait(select.POLLIN)

    def _receive(self, flow, end, tell):
        while (place := flow.place(end)) is not None:
            got = self._some(place)
            if not got:
                return False
            flow.filled(got)
            if tell:
                tell(flow.done)
        return True


def open_inlet(f):
    """An Inlet for a descriptor, a socket, or an object that has ``readinto``, ``read`` or ``recv_into``."""
    descriptor = descriptor_of(f)
    if descriptor is not None:
        return DescriptorInlet(descriptor)
    if isinstance(f, socket.socket):  # of a kind that does more than receive, such as TLS
        return ObjectInlet(f, patient(f, f.recv_into, select.POLLIN))
    if not hasattr(f, "read") and not hasattr(f, "readinto"):
        raise unfit(f, "read")
    return ObjectInlet(f, ObjectReader(f))


# -- out


class Outlet:
    """Takes a stream from front to back."""

    def close(self):
        """Let go of what this took for writing. Whose end it is stays open."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def flush(self):
        """Let what is written go."""


class DescriptorOutlet(Outlet):
    def __init__(self, descriptor):
        self.descriptor, self.name = descriptor, descriptor.name

    def close(self):
        self.descriptor.close()

    def write(self, data):
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        while view:
            try:
                view = view[os.write(self.descriptor.fd, view) :]
            except BlockingIOError:
                self.descriptor.wait_again(select.POLLOUT)
            self.descriptor.check_open()

    def send(self, flow, end, tell=None):
        """Write a Flow up to segment ``end``."""
        while not flow.sent(end):
            status = flow.send(self.descriptor.fd, end)
            self.descriptor.check(status, select.POLLOUT)
            if tell:
                tell(flow.done)


class ObjectOutlet(Outlet):
    """``write(data)`` takes all of it, ``flush()`` lets it go."""

    def __init__(self, f, write, flush=None):
        self.name, self.write = name_of(f), write
        self.flush = flush or super().flush

    def send(self, flow, end, tell=None):
        while (piece := flow.piece(end)) is not None:
            self.write(piece)
            if tell:
                tell(flow.done)


def open_outlet(f):
    """An Outlet for a descriptor, a socket, or an object that has ``write``."""
    descriptor = descriptor_of(f)
    if descriptor is not None:
        return DescriptorOutlet(descriptor)
    if isinstance(f, socket.socket):
        return ObjectOutlet(f, f.sendall if f.gettimeout() != 0 else sender(f))
    if not hasattr(f, "write"):
        raise unfit(f, "write")
    stream = Stream(f)
    return ObjectOutlet(f, stream.write, stream.flush)


def sender(f):
    """What sendall is, for a socket that never waits."""
    send = patient(f, f.send, select.POLLOUT)

    def send_all(data):
        view = memoryview(data).cast("B")
        while view:
            view = view[send(view) :]

    return send_all
