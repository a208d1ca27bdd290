# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
"""The end records and the directory of a ZIP, read into numbers and columns; docs/format.md names every field.

Nothing is read before it is known to be there, and no sum of untrusted numbers is formed. Functions answer
with None or a status; what that means to a reader is said in ``containers/``.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memchr, memcmp

from ._bytes cimport le16, le32, le64
from ._held cimport Held, hold, release
from ._zip_columns cimport (
    C_COLUMNS, C_CRC, C_FLAGS, C_HEADER, C_KIND, C_LIMIT, C_METHOD, C_NAME, C_NAME_NBYTES, C_NBYTES, C_STORED,
    LOCAL_HEADER, LOCAL_NBYTES, check_names, hold_columns,
)

cdef enum:
    CENTRAL_HEADER = 0x02014B50
    END_RECORD = 0x06054B50
    END_RECORD_64 = 0x06064B50
    END_LOCATOR_64 = 0x07064B50

    CENTRAL_NBYTES = 46
    END_NBYTES = 22
    END_64_NBYTES = 56
    LOCATOR_NBYTES = 20

    EXTRA_ZIP64 = 0x0001
    MAX32 = 0xFFFFFFFF
    FLAG_MASKED = 0x2000

HEADER = C_HEADER  # where the local header lies in the source
STORED = C_STORED  # bytes in the source
NBYTES = C_NBYTES  # bytes of content
CRC = C_CRC  # -1 where the writer computed none
METHOD = C_METHOD
FLAGS = C_FLAGS
NAME = C_NAME  # where the name lies in the directory
NAME_NBYTES = C_NAME_NBYTES
LIMIT = C_LIMIT  # what the entry must not reach into: the next local header, or the directory
KIND = C_KIND  # IS_FOLDER, IS_PICKLE
COLUMNS = C_COLUMNS

cdef enum:
    K_FOLDER = 1
    K_PICKLE = 2

IS_FOLDER = K_FOLDER
IS_PICKLE = K_PICKLE  # the last part of the name is data.pkl

cdef enum:
    D_OK, D_SHORT, D_SIGNATURE, D_NAME, D_EXTRA, D_DISK, D_MASKED, D_HEADER, D_STORED, D_NBYTES, D_LEFT, D_LENGTH

OK = D_OK
ENTRY_CUT = D_SHORT
ENTRY_SIGNATURE = D_SIGNATURE
ENTRY_NAME = D_NAME
ENTRY_EXTRA = D_EXTRA
ENTRY_DISK = D_DISK
ENTRY_MASKED = D_MASKED
ENTRY_HEADER = D_HEADER
ENTRY_STORED = D_STORED
ENTRY_NBYTES = D_NBYTES
ENTRIES_LEFT = D_LEFT
ENTRY_LENGTH = D_LENGTH

# ---------------------------------------------------------------- end of the archive


def find_end_records(window, Py_ssize_t most):
    """Find every end-record signature in a buffer: a list of positions, the last one first, at most ``most``."""
    cdef Held held
    cdef const uint8_t* start
    cdef const uint8_t* end
    cdef const uint8_t* p
    cdef list found = []
    held.count = 0
    try:
        start = p = <const uint8_t*> hold(&held, window, PyBUF_SIMPLE, -1)
        end = start + held.view[0].len - 3
        while p < end:
            p = <const uint8_t*> memchr(p, c"P", end - p)
            if p == NULL:
                break
            if le32(p) == END_RECORD:
                found.append(p - start)
            p += 1
    finally:
        release(&held)
    found.reverse()
    return found[:most]


cdef const uint8_t* structure(
    Held* held, buffer, Py_ssize_t at, Py_ssize_t nbytes, uint32_t expected
) except? NULL:
    """Where a structure with the expected signature lies, NULL where it does not, or not with all its bytes."""
    cdef const uint8_t* start = <const uint8_t*> hold(held, buffer, PyBUF_SIMPLE, -1)
    if at < 0 or at > held.view[0].len - nbytes or le32(start + at) != expected:
        return NULL
    return start + at


def has_header(buffer, Py_ssize_t at, bint central):
    """Tell whether the signature of a central (else: local) header stands at ``at``."""
    cdef Held held
    held.count = 0
    try:
        return structure(&held, buffer, at, 4, CENTRAL_HEADER if central else LOCAL_HEADER) != NULL
    finally:
        release(&held)


def end_record(buffer, Py_ssize_t at):
    """Read an end record: (disk, directory disk, entries here, entries, nbytes, offset, comment nbytes), or None."""
    cdef Held held
    cdef const uint8_t* p
    held.count = 0
    try:
        p = structure(&held, buffer, at, END_NBYTES, END_RECORD)
        if p == NULL:
            return None
        return le16(p + 4), le16(p + 6), le16(p + 8), le16(p + 10), le32(p + 12), le32(p + 16), le16(p + 20)
    finally:
        release(&held)


def end_locator_64(buffer, Py_ssize_t at):
    """Read a zip64 locator: (disk, offset of the zip64 end record, number of disks), or None."""
    cdef Held held
    cdef const uint8_t* p
    held.count = 0
    try:
        p = structure(&held, buffer, at, LOCATOR_NBYTES, END_LOCATOR_64)
        if p == NULL:
            return None
        return le32(p + 4), le64(p + 8), le32(p + 16)
    finally:
        release(&held)


def end_record_64(buffer, Py_ssize_t at):
    """Read a zip64 end record: (bytes that follow, disk, directory disk, entries here, entries, nbytes, offset)."""
    cdef Held held
    cdef const uint8_t* p
    held.count = 0
    try:
        p = structure(&held, buffer, at, END_64_NBYTES, END_RECORD_64)
        if p == NULL:
            return None
        return le64(p + 4), le32(p + 16), le32(p + 20), le64(p + 24), le64(p + 32), le64(p + 40), le64(p + 48)
    finally:
        release(&held)


# ---------------------------------------------------------------- the directory
cdef int read_extra_64(
    const uint8_t* p, const uint8_t* end, uint64_t* nbytes, uint64_t* stored, uint64_t* header
) noexcept nogil:
    """Replace the numbers that say "look in the zip64 extra" by what it holds, in its fixed order."""
    cdef uint16_t length
    cdef uint64_t* wanted[3]
    cdef int i
    wanted[0], wanted[1], wanted[2] = nbytes, stored, header
    while end - p >= 4:
        length = le16(p + 2)
        if length > end - p - 4:
            return D_EXTRA
        if le16(p) == EXTRA_ZIP64:
            p += 4
            end = p + length
            for i in range(3):
                if wanted[i][0] == MAX32:
                    if end - p < 8:
                        return D_EXTRA
                    wanted[i][0] = le64(p)
                    p += 8
            return D_OK
        p += 4 + length
    return D_OK  # no such extra: the number means itself


cdef int read_entry(
    const uint8_t* start, int64_t total, int64_t* at, int64_t* row, int64_t count, int64_t bias, int64_t directory
) noexcept nogil:
    """Read the entry at ``at`` into the column cells from ``row`` on, ``count`` apart.

    Moves ``at`` behind it where it can be seen how long it is, and gives its name then, be the rest wrong or not.
    """
    cdef const uint8_t* p = start + at[0]
    cdef int64_t left = total - at[0]
    cdef int64_t name_nbytes, extra_nbytes, comment_nbytes
    cdef uint64_t stored, nbytes, header
    cdef uint16_t disk
    if left < CENTRAL_NBYTES:
        return D_SHORT
    if le32(p) != CENTRAL_HEADER:
        return D_SIGNATURE
    name_nbytes, extra_nbytes, comment_nbytes = le16(p + 28), le16(p + 30), le16(p + 32)
    if name_nbytes + extra_nbytes + comment_nbytes > left - CENTRAL_NBYTES:
        return D_NAME
    row[C_NAME * count] = at[0] + CENTRAL_NBYTES
    row[C_NAME_NBYTES * count] = name_nbytes
    at[0] += CENTRAL_NBYTES + name_nbytes + extra_nbytes + comment_nbytes
    stored, nbytes, header, disk = le32(p + 20), le32(p + 24), le32(p + 42), le16(p + 34)
    if stored == MAX32 or nbytes == MAX32 or header == MAX32:
        if read_extra_64(
            p + CENTRAL_NBYTES + name_nbytes,
            p + CENTRAL_NBYTES + name_nbytes + extra_nbytes,
            &nbytes, &stored, &header,
        ) != D_OK:
            return D_EXTRA
    if disk > 1 and disk != 0xFFFF:
        return D_DISK
    if le16(p + 8) & FLAG_MASKED:
        return D_MASKED
    if header > <uint64_t> (directory - bias):
        return D_HEADER
    if stored > <uint64_t> directory:
        return D_STORED
    if nbytes > <uint64_t> INT64_MAX:
        return D_NBYTES
    row[C_HEADER * count] = <int64_t> header + bias
    row[C_STORED * count] = <int64_t> stored
    row[C_NBYTES * count] = <int64_t> nbytes
    row[C_CRC * count] = -1 if le32(p + 16) == 0 and nbytes != 0 else <int64_t> le32(p + 16)
    row[C_METHOD * count] = le16(p + 10)
    row[C_FLAGS * count] = le16(p + 8)
    return D_OK


def read_directory(directory, columns, Py_ssize_t count, int64_t start, int64_t bias):
    """Fill ``columns`` from the bytes of a directory that lies at ``start``; all but LIMIT and KIND.

    ``bias`` is added to the offsets. Returns (status, entry, position in the directory).
    """
    cdef Held held
    cdef const uint8_t* p
    cdef int64_t* cells
    cdef int64_t i = 0, at = 0, begin = 0, nbytes
    cdef int status = D_OK
    check_place(start, bias)
    held.count = 0
    try:
        p = <const uint8_t*> hold(&held, directory, PyBUF_SIMPLE, -1)
        nbytes = held.view[0].len
        cells = <int64_t*> hold_columns(&held, columns, count, PyBUF_WRITABLE)
        with nogil:
            while i < count:
                begin = at
                status = read_entry(p, nbytes, &at, cells + i, count, bias, start)
                if status != D_OK:
                    at = begin
                    break
                i += 1
        if status == D_OK and at != nbytes:
            status = D_LEFT
        return status, i, at
    finally:
        release(&held)


cdef int check_place(int64_t start, int64_t bias) except -1:
    if bias < 0 or start < bias:
        raise ValueError(f"no directory at {start} has a bias of {bias}")
    return 0


cdef int64_t next_entry(const uint8_t* p, int64_t at, int64_t nbytes) noexcept nogil:
    """Where the next signature of an entry stands, from ``at`` on; ``nbytes`` where none does."""
    cdef const uint8_t* found
    while at < nbytes - 3:
        found = <const uint8_t*> memchr(p + at, c"P", nbytes - 3 - at)
        if found == NULL:
            break
        at = found - p
        if le32(found) == CENTRAL_HEADER:
            return at
        at += 1
    return nbytes


def survey_directory(directory, columns, Py_ssize_t count, int64_t start, int64_t bias, status, places):
    """Read every entry that there is, as ``read_directory`` does, and go on behind those that are wrong.

    ``status`` and ``places`` are int64 columns of ``count``: how each entry fares, and where in the directory it
    stands. One that is wrong has at most a name (else NAME_NBYTES is 0), and HEADER -1. Returns how many were filled.
    """
    cdef Held held
    cdef const uint8_t* p
    cdef int64_t* cells
    cdef int64_t* status_at
    cdef int64_t* place_at
    cdef int64_t i = 0, column, at = 0, found, nbytes
    check_place(start, bias)
    held.count = 0
    try:
        p = <const uint8_t*> hold(&held, directory, PyBUF_SIMPLE, -1)
        nbytes = held.view[0].len
        cells = <int64_t*> hold_columns(&held, columns, count, PyBUF_WRITABLE)
        status_at = <int64_t*> hold(&held, status, PyBUF_WRITABLE, count * 8)
        place_at = <int64_t*> hold(&held, places, PyBUF_WRITABLE, count * 8)
        with nogil:
            while i < count and at < nbytes:
                place_at[i] = at
                for column in range(C_COLUMNS):
                    cells[column * count + i] = 0
                status_at[i] = read_entry(p, nbytes, &at, cells + i, count, bias, start)
                # An entry with another in its name is one whose lengths are wrong: they would hide a thousand others.
                found = next_entry(p, place_at[i] + CENTRAL_NBYTES, at)
                if found < at:
                    status_at[i], at = D_LENGTH, found
                    cells[C_NAME_NBYTES * count + i] = 0
                if status_at[i] != D_OK:
                    cells[C_HEADER * count + i] = -1
                    at = next_entry(p, max(at, place_at[i] + 1), nbytes)
                i += 1
        return i
    finally:
        release(&held)


def is_ascending(values):
    """Tell whether an int64 array never falls."""
    cdef Held held
    cdef const int64_t* p
    cdef Py_ssize_t i
    held.count = 0
    try:
        p = <const int64_t*> hold(&held, values, PyBUF_SIMPLE, -1)
        for i in range(1, held.view[0].len // 8):
            if p[i] < p[i - 1]:
                return False
        return True
    finally:
        release(&held)


cdef inline int64_t room(const int64_t* row, int64_t count, int64_t limit) noexcept nogil:
    """Bytes left between the least end of an entry and ``limit``; negative where it reaches over it."""
    cdef int64_t left = limit - row[C_HEADER * count]
    if left < LOCAL_NBYTES + row[C_NAME_NBYTES * count]:
        return -1
    return left - LOCAL_NBYTES - row[C_NAME_NBYTES * count] - row[C_STORED * count]


def set_limits(columns, order, Py_ssize_t count, int64_t directory):
    """Fill LIMIT, walking entries in the ``order`` of their headers (None: as they are).

    Returns the first entry that reaches into the next one, or into the directory; -1 if none does.
    """
    cdef Held held
    cdef int64_t* cells
    cdef const int64_t* rows = NULL
    cdef int64_t i, row, limit = directory, wrong = -1
    held.count = 0
    try:
        cells = <int64_t*> hold_columns(&held, columns, count, PyBUF_WRITABLE)
        if order is not None:
            rows = <const int64_t*> hold(&held, order, PyBUF_SIMPLE, count * 8)
        for i in range(count - 1, -1, -1):
            row = i if rows == NULL else rows[i]
            if row < 0 or row >= count:
                raise ValueError(f"order holds {row}, there are {count} entries")
            cells[C_LIMIT * count + row] = limit
            if room(cells + row, count, limit) < 0:
                wrong = row
            limit = cells[C_HEADER * count + row]
        return wrong
    finally:
        release(&held)


# ---------------------------------------------------------------- names
def set_kinds(names, columns, Py_ssize_t count):
    """Fill KIND from the names."""
    cdef Held held
    cdef int64_t* cells
    cdef const char* text
    cdef const char* end
    cdef int64_t i, nbytes, kind
    held.count = 0
    try:
        text = <const char*> hold(&held, names, PyBUF_SIMPLE, -1)
        cells = hold_columns(&held, columns, count, PyBUF_WRITABLE)
        check_names(held.view[0].len, cells, count)
        for i in range(count):
            nbytes = cells[C_NAME_NBYTES * count + i]
            end = text + cells[C_NAME * count + i] + nbytes
            kind = 0
            if nbytes > 0 and (end - 1)[0] == c"/":
                kind = K_FOLDER
            elif nbytes >= 8 and memcmp(end - 8, b"data.pkl", 8) == 0 and (nbytes == 8 or (end - 9)[0] == c"/"):
                kind = K_PICKLE
            cells[C_KIND * count + i] = kind
    finally:
        release(&held)


def rows_under(names, columns, Py_ssize_t count, bytes prefix, rows):
    """Write the entries whose name goes on after ``prefix``, and that are files, to ``rows``; returns how many."""
    cdef Held held
    cdef const int64_t* cells
    cdef const char* text
    cdef const char* start = prefix
    cdef int64_t* found
    cdef Py_ssize_t i, nfound = 0, nbytes = len(prefix)
    held.count = 0
    try:
        text = <const char*> hold(&held, names, PyBUF_SIMPLE, -1)
        cells = hold_columns(&held, columns, count, PyBUF_SIMPLE)
        found = <int64_t*> hold(&held, rows, PyBUF_WRITABLE, count * 8)
        check_names(held.view[0].len, cells, count)
        for i in range(count):
            if cells[C_KIND * count + i] == K_FOLDER or cells[C_NAME_NBYTES * count + i] <= nbytes:
                continue
            if memcmp(text + cells[C_NAME * count + i], start, nbytes) == 0:
                found[nfound] = i
                nfound += 1
        return nfound
    finally:
        release(&held)


def index_names(names, columns, Py_ssize_t count, Py_ssize_t skip, bytes folder):
    """Sort entries into (those in ``folder``, the others, names that occur twice).

    The first two are dicts, name -> row, without the first ``skip`` bytes and without ``folder``.
    """
    cdef Held held
    cdef const int64_t* cells
    cdef const char* text
    cdef const char* name
    cdef const char* start = folder
    cdef Py_ssize_t i, nbytes, folder_nbytes = len(folder)
    cdef dict inside = {}, others = {}
    cdef list twice = []
    held.count = 0
    try:
        text = <const char*> hold(&held, names, PyBUF_SIMPLE, -1)
        cells = hold_columns(&held, columns, count, PyBUF_SIMPLE)
        check_names(held.view[0].len, cells, count)
        for i in range(count):
            name = text + cells[C_NAME * count + i] + skip
            nbytes = cells[C_NAME_NBYTES * count + i] - skip
            if skip < 0 or nbytes < 0:
                raise ValueError(f"a name has no {skip} bytes to skip")
            if nbytes > folder_nbytes and memcmp(name, start, folder_nbytes) == 0:
                key = PyUnicode_DecodeUTF8(name + folder_nbytes, nbytes - folder_nbytes, "surrogateescape")
                if inside.setdefault(key, i) != i:
                    twice.append(folder.decode() + key)
            else:
                key = PyUnicode_DecodeUTF8(name, nbytes, "surrogateescape")
                if others.setdefault(key, i) != i:
                    twice.append(key)
        return inside, others, twice
    finally:
        release(&held)
