"""Records into memory: read by position, in parallel where that pays, each summed and compared with its CRC-32.

Memory that a failed fill leaves behind is in part unwritten; whoever allocated it discards it.
"""

import collections
import os
import threading
import zlib

import numpy as np

from . import _crc32, _read, _records, workers
from ._memory import Pages
from .errors import CheckpointError, ChecksumError, FormatError, UnsupportedError
from .memory import allocate
from .records import DEFLATED, STORED

# What a source without a descriptor is asked for at a time, and what is inflated at a time.
CHUNK = 1 << 20
DONE, STOP = 0, 1  # the places in a control column


def fill(
    source, records, rows, addresses, owners, *, verify=True, threads=None, progress=None, huge=None
):
    """Read records into memory, inflate what is deflated, and return how many were verified.

    ``rows`` are numbers of ``records``; ``addresses`` is an int64 column of where each goes, ``nbytes`` bytes of
    writable memory, which lives as long as ``owners`` do: the threads that write hold them, too, since an exception
    of a signal handler may end this function before they have ended. ``progress(done, total)`` is called from this
    thread, in bytes. ``huge`` is the Allocation's, where the memory is one that nobody has written to.
    Raises FormatError where the source ends early or a deflated record is bad, ChecksumError for the first
    record (in the order of the file) that is not what its CRC-32 says, OSError where the system fails.
    """
    fill = _Fill(source, records, rows, verify, threads, progress, owners, huge=huge)
    crc = fill.read(np.ascontiguousarray(addresses, dtype=np.int64))
    return _check(source, records, fill.rows, crc) if verify else 0


def read_storages(
    source, records, rows, *, verify=True, threads=None, allocate=allocate, progress=None
):
    """Read records into fresh memory of ``allocate``, and return their Allocation and how many were verified."""
    rows = np.asarray(rows, dtype=np.int64)
    # Inflated sizes are claims: no memory is taken for one that its stored bytes cannot hold.
    _check_sizes(source, records, rows)
    order = np.argsort(records.offset[rows], kind="stable")
    allocation = allocate(records.nbytes[rows[order]])
    verified = fill(
        source,
        records,
        rows[order],
        allocation.address,
        allocation.owners,
        verify=verify,
        threads=threads,
        progress=progress,
        huge=allocation.huge,
    )
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return allocation._replace(
        owners=[allocation.owners[i] for i in back], address=allocation.address[back]
    ), verified


def checksums(source, records, rows, *, threads=None, progress=None):
    """Compute the CRC-32 of records without keeping their bytes: (crc, failures), both in the order of ``rows``.

    ``crc`` is an int64 column, ``failures`` the error of each that cannot be read or inflated, by its position: one that is bad
    hides no other. Comparing is the caller's business.
    """
    fill = _Fill(source, records, rows, True, threads, progress, go_on=True)
    crc = fill.read(np.zeros(len(rows), dtype=np.int64))
    return crc, dict(sorted(fill.failures.items()))


class _Fill:
    """One fill under way. ``control`` is what its threads share: bytes done, and the wish to stop.

    The first record that cannot be read ends it with an error, or with ``go_on`` leaves one in ``failures``, by position.
    """

    def __init__(
        self,
        source,
        records,
        rows,
        want_crc,
        threads,
        progress,
        owners=None,
        go_on=False,
        huge=None,
    ):
        source.check_open()
        self.source, self.records, self.owners = source, records, owners
        self.rows = np.asarray(rows, dtype=np.int64)
        self.kernel_name = _crc32.default_kernel()
        self.want_crc, self.threads, self.progress = want_crc, threads, progress
        self.control = np.zeros(2, dtype=np.int64)
        self.go_on, self.failures, self.huge = go_on, {}, huge
        self.caller, self.lock = threading.get_ident(), threading.Lock()
        self.total = int(records.nbytes[self.rows].sum())

    def read(self, addresses):
        """Read all rows to their addresses (0: nowhere); the CRC column, zeros where it is not wanted."""
        crc = np.zeros(len(self.rows), dtype=np.int64)
        if len(addresses) != len(self.rows):
            raise ValueError(f"{len(addresses)} addresses for {len(self.rows)} records")
        self.pages = Pages(addresses, self.records.nbytes[self.rows], self.huge)
        method = self.records.method[self.rows]
        stored = np.flatnonzero(method == STORED)
        stored = stored[np.argsort(self.records.offset[self.rows[stored]], kind="stable")]
        if self.source.fd >= 0 or self.source.view is not None:
            crc[stored] = self._read_natively(stored, addresses[stored])
        else:
            self._read_each(stored, self._copy, addresses, crc)
        if len(deflated := np.flatnonzero(method != STORED)):
            nbytes = int(self.records.nbytes[self.rows[deflated]].sum())
            workers.run(
                lambda number: self._inflate_all(deflated, addresses, crc, number),
                nbytes,
                self.threads,
                self._cancel,
                self._tell if self.progress else None,
            )
            if self.failures and not self.go_on:
                raise self.failures[min(self.failures)]
        self._tell()
        return crc

    def _read_each(self, positions, read, addresses, crc):
        for i in positions:
            try:
                crc[i] = read(self.rows[i], int(addresses[i]))
            except (CheckpointError, OSError) as error:
                if not self.go_on:
                    raise
                self.failures[int(i)] = error

    def _inflate_all(self, positions, addresses, crc, number):
        """Inflate records, ``number`` at a time: zlib lets other threads run. Errors are left in ``failures``."""
        todo, raised = collections.deque(positions.tolist()), []

        def work():
            try:
                while todo and not self.control[STOP]:
                    self._inflate_next(todo, addresses, crc)
            except BaseException as error:  # of ours or of the system's: for whoever waits
                raised.append(error)
                self._cancel()

        workers.together(work, min(number, len(todo)))
        if raised:
            raise raised[0]

    def _inflate_next(self, todo, addresses, crc):
        try:
            i = todo.popleft()
        except IndexError:
            return  # another thread was faster
        try:
            crc[i] = self._inflate(self.rows[i], int(addresses[i]))
        except (CheckpointError, OSError) as error:
            self.failures[i] = error
            if not self.go_on:
                self._cancel()

    def _tell(self):
        if self.progress:
            self.progress(int(self.control[DONE]), self.total)

    def _cancel(self):
        self.control[STOP] = 1

    def _read_natively(self, positions, addresses):
        rows = self.rows[positions]
        source, offset, nbytes = self.source, self.records.offset[rows], self.records.nbytes[rows]
        crc = np.zeros(len(rows), dtype=np.int64)
        status = np.zeros(len(rows), dtype=np.int64)
        kernel = _crc32.kernel_id(self.kernel_name)

        def read(num_threads):
            with source.in_use():
                return _read.fill(
                    source.fd,
                    source.base,
                    source.view,
                    source.nbytes,
                    offset,
                    nbytes,
                    addresses,
                    crc if self.want_crc else None,
                    status,
                    self.control,
                    kernel=kernel,
                    num_threads=num_threads,
                    go_on=self.go_on,
                    huge=self.huge,
                )

        tell = self._tell if self.progress else None
        if workers.run(read, int(nbytes.sum()), self.threads, self._cancel, tell):
            bad = np.flatnonzero((status != _read.STATUS_OK) & (status != _read.STATUS_STOPPED))
            errors = [
                self._error_of(int(status[i]), int(offset[i]), int(nbytes[i]))
                for i in (bad if self.go_on else bad[:1])
            ]
            if not self.go_on:
                raise errors[0]
            self.failures.update(zip(positions[bad].tolist(), errors, strict=True))
        return crc

    def _error_of(self, status, offset, nbytes):
        """The error for an extent that could not be read."""
        if status == _read.STATUS_SHORT:
            return self.source.short(offset, nbytes)
        return OSError(status, os.strerror(status), self.source.name)

    def _copy(self, row, address):
        """Read one record through the source's own readinto; its CRC."""
        start, nbytes, crc = int(self.records.offset[row]), int(self.records.nbytes[row]), 0
        scratch = None if address else memoryview(bytearray(min(nbytes, CHUNK)))
        for done in range(0, nbytes, CHUNK):
            n = min(CHUNK, nbytes - done)
            view = self._place(address + done, n) if address else scratch[:n]
            self.source.readinto(start + done, view)
            crc = self._took(view, crc)
        return crc

    def _inflate(self, row, address):
        """Inflate one record chunk by chunk; its CRC."""
        done = crc = 0
        for data in inflated(self.source, self.records, row):
            if address:
                self._place(address + done, len(data))[:] = data
            crc = self._took(data, crc)
            done += len(data)
            if self.control[STOP]:
                break
        return crc

    def _place(self, address, nbytes):
        """A view of memory that is about to be filled."""
        self.pages.make(address, nbytes)
        return _read.view_of(address, nbytes)

    def _took(self, data, crc):
        """Count bytes that were read, tell so, and return the CRC that goes on over them."""
        with self.lock:
            self.control[DONE] += len(data)
        if (
            threading.get_ident() == self.caller
        ):  # another thread's news is told by the one that waits for it
            self._tell()
        return _crc32.crc32(data, crc, self.kernel_name) if self.want_crc else 0


def inflated(source, records, row):
    """Inflate one record, never to more than it is said to be: yields its content, at most CHUNK bytes at a time.

    Raises UnsupportedError for another compression, FormatError where the data is damaged, at the latest when all was yielded.
    """
    _check_method(source, records, row)
    nbytes, offset = int(records.nbytes[row]), int(records.offset[row])
    end = offset + int(records.stored_nbytes[row])

    def bad(found):
        return _error(FormatError, source, records, row, f"{found}; the file is damaged")

    inflater, done, pending = zlib.decompressobj(-zlib.MAX_WBITS), 0, b""
    while not inflater.eof:
        if not pending and offset < end:
            pending = source.read(offset, min(CHUNK, end - offset))
            offset += len(pending)
        try:
            # 0 would mean "no limit"; the byte too many is an error below
            data = inflater.decompress(pending, min(CHUNK, nbytes - done) or 1)
        except zlib.error as error:
            raise bad(f"its deflated data is damaged ({error})") from None
        stuck = not data and not inflater.eof and len(pending) == len(inflater.unconsumed_tail)
        pending = inflater.unconsumed_tail
        if len(data) > nbytes - done:
            raise bad(f"it inflates to more than the {nbytes} bytes that the directory says")
        done += len(data)
        if data:
            yield data
        if stuck and offset == end:
            raise bad(f"its deflated data ends after {done} of {nbytes} bytes")
    if done != nbytes:
        raise bad(f"it inflates to {done} bytes, the directory says {nbytes}")


def _check_method(source, records, row):
    if (method := int(records.method[row])) != DEFLATED:
        message = f"it is compressed by ZIP method {method}, and only 0 (stored) and 8 (deflated) are read"
        raise _error(
            UnsupportedError, source, records, row, f"{message}; save it without compression"
        )


def _check_sizes(source, records, rows):
    at = _records.first_impossible(
        records.offset,
        records.nbytes,
        records.stored_nbytes,
        records.method,
        len(records),
        rows,
        source.nbytes,
    )
    if at >= 0:
        row = rows[at]
        found = f"it claims {records.nbytes[row]} bytes, and {records.stored_nbytes[row]} are stored in a file of {source.nbytes}"
        raise _error(FormatError, source, records, row, f"{found}; the file is damaged or cut off")


def _check(source, records, rows, crc):
    """Compare CRCs with the directory's; how many there were to compare."""
    wrong = np.empty(len(rows), dtype=np.int64)
    columns = (records.crc32, records.nbytes, len(records))
    known, failed = _records.compare(crc, *columns, rows, wrong)
    if not failed:
        return known
    bad = wrong[:failed]
    first = bad[np.argmin(records.offset[rows[bad]])]
    row = rows[first]
    others = f"; {failed - 1} more records are wrong, too" if failed > 1 else ""
    raise mismatch(source, records, row, int(crc[first]), int(records.crc32[row]), others)


def mismatch(source, records, row, actual, expected, more=""):
    """The error for a record whose CRC-32 is another than its directory says."""
    found = f"CRC-32 is {actual:08x}, the directory says {expected:08x}{more}"
    advice = "the file is damaged (verify=False reads it anyway)"
    return _error(
        ChecksumError, source, records, row, f"{found}; {advice}", expected=expected, actual=actual
    )


def _error(kind, source, records, row, found, **more):
    """The error for one record, in the common form."""
    name, offset = records.names[row], int(records.offset[row])
    return kind(
        f"{source.name}: record {name!r} at byte {offset}: {found}",
        path=source.name,
        record=name,
        offset=offset,
        **more,
    )
