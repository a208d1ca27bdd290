"""Records into memory: read by position, in parallel where that pays, each summed and compared with its CRC-32.

Memory that a failed fill leaves behind is in part unwritten; whoever allocated it discards it.
"""

import os
import zlib

import numpy as np

from . import _crc32, _read, workers
from .errors import ChecksumError, FormatError, UnsupportedError
from .memory import allocate
from .records import DEFLATED, NO_CRC, STORED

# What a source without a descriptor is asked for at a time, and what is inflated at a time.
CHUNK = 1 << 20
DONE, STOP = 0, 1  # the places in a control column


def fill(source, records, rows, addresses, *, verify=True, threads=None, progress=None):
    """Read records into memory, inflate what is deflated, and return how many were verified.

    ``rows`` are numbers of ``records``; ``addresses`` is an int64 column of where each goes, ``nbytes`` bytes of
    writable memory that the caller keeps alive. ``progress(done, total)`` is called from this thread, in bytes.
    Raises FormatError where the source ends early or a deflated record is bad, ChecksumError for the first
    record (in the order of the file) that is not what its CRC-32 says, OSError where the system fails.
    """
    fill = _Fill(source, records, rows, verify, threads, progress)
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
        verify=verify,
        threads=threads,
        progress=progress,
    )
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return allocation._replace(
        owners=[allocation.owners[i] for i in back], address=allocation.address[back]
    ), verified


def checksums(source, records, rows, *, threads=None, progress=None):
    """Compute the CRC-32 of records without keeping their bytes: an int64 column in the order of ``rows``.

    Raises what ``fill`` raises, but ChecksumError: comparing is the caller's business.
    """
    return _Fill(source, records, rows, True, threads, progress).read(
        np.zeros(len(rows), dtype=np.int64)
    )


class _Fill:
    """One fill under way. ``control`` is what its threads share: bytes done, and the wish to stop."""

    def __init__(self, source, records, rows, want_crc, threads, progress):
        source.check_open()
        self.source, self.records = source, records
        self.rows = np.asarray(rows, dtype=np.int64)
        self.kernel_name = _crc32.default_kernel()
        self.want_crc, self.threads, self.progress = want_crc, threads, progress
        self.control = np.zeros(2, dtype=np.int64)
        self.total = int(records.nbytes[self.rows].sum())

    def read(self, addresses):
        """Read all rows to their addresses (0: nowhere); the CRC column, zeros where it is not wanted."""
        crc = np.zeros(len(self.rows), dtype=np.int64)
        if len(addresses) != len(self.rows):
            raise ValueError(f"{len(addresses)} addresses for {len(self.rows)} records")
        method = self.records.method[self.rows]
        stored = np.flatnonzero(method == STORED)
        stored = stored[np.argsort(self.records.offset[self.rows[stored]], kind="stable")]
        if self.source.fd >= 0 or self.source.view is not None:
            crc[stored] = self._read_natively(self.rows[stored], addresses[stored])
        else:
            for i in stored:
                crc[i] = self._copy(self.rows[i], int(addresses[i]))
        for i in np.flatnonzero(method != STORED):
            crc[i] = self._inflate(self.rows[i], int(addresses[i]))
        self._tell()
        return crc

    def _tell(self):
        if self.progress:
            self.progress(int(self.control[DONE]), self.total)

    def _cancel(self):
        self.control[STOP] = 1

    def _read_natively(self, rows, addresses):
        source, offset, nbytes = self.source, self.records.offset[rows], self.records.nbytes[rows]
        crc = np.zeros(len(rows), dtype=np.int64)
        status = np.zeros(len(rows), dtype=np.int64)
        kernel = _crc32.kernel_id(self.kernel_name)

        def read(num_threads):
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
            )

        tell = self._tell if self.progress else None
        if workers.run(read, int(nbytes.sum()), self.threads, self._cancel, tell):
            self._fail(status, offset, nbytes)
        return crc

    def _fail(self, status, offset, nbytes):
        """Raise for the first extent, in the order of the file, that could not be read."""
        bad = np.flatnonzero((status != _read.STATUS_OK) & (status != _read.STATUS_STOPPED))[0]
        where, wanted = int(offset[bad]), int(nbytes[bad])
        if status[bad] == _read.STATUS_SHORT:
            raise self.source.short(where, wanted, min(wanted, max(0, _there(self.source) - where)))
        raise OSError(int(status[bad]), os.strerror(int(status[bad])), self.source.name)

    def _copy(self, row, address):
        """Read one record through the source's own readinto; its CRC."""
        start, nbytes, crc = int(self.records.offset[row]), int(self.records.nbytes[row]), 0
        scratch = None if address else memoryview(bytearray(min(nbytes, CHUNK)))
        for done in range(0, nbytes, CHUNK):
            n = min(CHUNK, nbytes - done)
            view = _read.view_of(address + done, n) if address else scratch[:n]
            self.source.readinto(start + done, view)
            crc = self._took(view, crc)
        return crc

    def _inflate(self, row, address):
        """Inflate one record chunk by chunk; its CRC. It never takes more memory than it says it needs."""
        records, nbytes = self.records, int(self.records.nbytes[row])
        self._check_method(row)
        offset, end = (
            int(records.offset[row]),
            int(records.offset[row] + records.stored_nbytes[row]),
        )
        inflater, done, crc, pending = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0, b""
        while not inflater.eof:
            if not pending and offset < end:
                pending = self.source.read(offset, min(CHUNK, end - offset))
                offset += len(pending)
            try:
                # 0 would mean "no limit"; the byte too many is an error below
                data = inflater.decompress(pending, min(CHUNK, nbytes - done) or 1)
            except zlib.error as error:
                raise self._bad(row, f"its deflated data is damaged ({error})") from None
            stuck = not data and not inflater.eof and len(pending) == len(inflater.unconsumed_tail)
            pending = inflater.unconsumed_tail
            if len(data) > nbytes - done:
                raise self._bad(
                    row, f"it inflates to more than the {nbytes} bytes that the directory says"
                )
            if address and data:
                _read.view_of(address + done, len(data))[:] = data
            crc = self._took(data, crc)
            done += len(data)
            if stuck and offset == end:
                raise self._bad(row, f"its deflated data ends after {done} of {nbytes} bytes")
        if done != nbytes:
            raise self._bad(row, f"it inflates to {done} bytes, the directory says {nbytes}")
        return crc

    def _took(self, data, crc):
        """Count bytes that were read, tell so, and return the CRC that goes on over them."""
        self.control[DONE] += len(data)
        self._tell()
        return _crc32.crc32(data, crc, self.kernel_name) if self.want_crc else 0

    def _check_method(self, row):
        if (method := int(self.records.method[row])) != DEFLATED:
            message = f"it is compressed by ZIP method {method}, and only 0 (stored) and 8 (deflated) are read"
            raise _error(
                UnsupportedError,
                self.source,
                self.records,
                row,
                f"{message}; save it without compression",
            )

    def _bad(self, row, found):
        return _error(FormatError, self.source, self.records, row, f"{found}; the file is damaged")


def _there(source):
    """How many bytes the source has now."""
    return (
        len(source.view) if source.view is not None else os.fstat(source.fd).st_size - source.base
    )


# A deflated match takes two bits at least and gives 258 bytes at most: 1032 bytes out of one.
MOST_INFLATION = 1032


def _check_sizes(source, records, rows):
    nbytes, stored = records.nbytes[rows], records.stored_nbytes[rows]
    room = np.where(records.method[rows] == DEFLATED, MOST_INFLATION * (stored + 1), stored)
    outside = (
        (records.offset[rows] < 0) | (stored < 0) | (stored > source.nbytes - records.offset[rows])
    )
    if len(bad := np.flatnonzero((nbytes > room) | (nbytes < 0) | outside)):
        found = f"it claims {nbytes[bad[0]]} bytes, and {stored[bad[0]]} are stored in a file of {source.nbytes}"
        raise _error(
            FormatError, source, records, rows[bad[0]], f"{found}; the file is damaged or cut off"
        )


def _check(source, records, rows, crc):
    """Compare CRCs with the directory's; how many there were to compare."""
    said = records.crc32[rows]
    # A writer that computes none writes 0 (set_crc32_options(False)); no bytes have 0, too.
    known = (said != NO_CRC) & ((said != 0) | (records.nbytes[rows] == 0))
    bad = np.flatnonzero(known & (crc != said))
    if not len(bad):
        return int(np.count_nonzero(known))
    first = bad[np.argmin(records.offset[rows[bad]])]
    row, actual, expected = rows[first], int(crc[first]), int(said[first])
    others = f"; {len(bad) - 1} more records are wrong, too" if len(bad) > 1 else ""
    raise mismatch(source, records, row, actual, expected, others)


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
