# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The leaves that LitData calls ``json``: tagged lists, dicts and scalars, or JSON text, into Python objects.

Counts are compared with the bytes that are left before anything is made of them, and nesting has a limit.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint64_t

from .._bytes cimport le32, le64, sle64

import json

from .litdata_errors import BadItem

cdef enum Tag:
    T_JSON = 0
    T_TEXTS = 1
    T_INTS = 2
    T_FLOATS = 3
    T_BOOLS = 4
    T_DICT = 5
    T_RECORDS = 6
    T_TEXT = 7
    T_INT = 8
    T_FLOAT = 9
    T_BOOL = 10
    T_NONE = 11
    # what a field of a record is
    F_NONE = 0x10
    F_TEXT = 0x11
    F_INT = 0x12
    F_FLOAT = 0x13
    F_BOOL = 0x14


cdef union Bits:
    uint64_t number
    double value


cdef struct Cursor:
    const uint8_t* data
    int64_t left
    int depth  # how much deeper dicts may nest


def decode_json(bytes payload not None, int depth):
    """Decode a leaf; dicts nest at most ``depth`` deep. Raises BadItem."""
    cdef Cursor cursor
    cursor.data, cursor.left = <const uint8_t*> PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload)
    cursor.depth = depth
    if cursor.left == 0 or cursor.data[0] > T_NONE:  # as it was before there were tags
        return json_text(payload)
    value = decode(&cursor)
    if cursor.left:
        raise BadItem(f"has {cursor.left} bytes behind its end")
    return value


cdef object json_text(bytes text):
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise BadItem(f"is not JSON that can be read ({error})") from None


cdef const uint8_t* take(Cursor* cursor, int64_t nbytes) except NULL:
    cdef const uint8_t* data = cursor.data
    if nbytes > cursor.left:
        raise BadItem(f"ends {nbytes - cursor.left} bytes too early")
    cursor.data += nbytes
    cursor.left -= nbytes
    return data


cdef int64_t take_count(Cursor* cursor, int64_t nbytes) except -1:
    """A number of things that have at least ``nbytes`` bytes each."""
    cdef int64_t count = le32(take(cursor, 4))
    if count > cursor.left // nbytes:
        raise BadItem(f"has {cursor.left} bytes for the {count} members that it gives")
    return count


cdef object take_text(Cursor* cursor):
    cdef int64_t nbytes = le32(take(cursor, 4))
    try:
        return PyUnicode_DecodeUTF8(<const char*> take(cursor, nbytes), nbytes, NULL)
    except UnicodeDecodeError as error:
        raise BadItem(f"has text that is not UTF-8 ({error.reason})") from None


cdef object take_float(Cursor* cursor):
    cdef Bits bits
    bits.number = le64(take(cursor, 8))
    return bits.value


cdef object take_dict(Cursor* cursor):
    cdef int64_t _i, count = take_count(cursor, 5)
    cdef dict result = {}
    if cursor.depth == 0:
        raise BadItem("has dicts nested too deep")
    cursor.depth -= 1
    for _i in range(count):
        key = take_text(cursor)
        result[key] = decode(cursor)
    cursor.depth += 1
    return result


cdef object take_records(Cursor* cursor):
    cdef int64_t _i, k, count = le32(take(cursor, 4))
    cdef int64_t fields = take_count(cursor, 4)
    cdef list keys = [take_text(cursor) for _i in range(fields)], rows = []
    cdef dict row
    if count and (fields == 0 or count > cursor.left // fields):
        raise BadItem(f"has {cursor.left} bytes for {count} records of {fields} fields")
    for _i in range(count):
        row = {}
        for k in range(fields):
            row[keys[k]] = take_field(cursor)
        rows.append(row)
    return rows


cdef object take_field(Cursor* cursor):
    cdef int tag = take(cursor, 1)[0]
    if tag == F_NONE:
        return None
    if tag == F_TEXT:
        return take_text(cursor)
    if tag == F_INT:
        return sle64(take(cursor, 8))
    if tag == F_FLOAT:
        return take_float(cursor)
    if tag == F_BOOL:
        return take(cursor, 1)[0] != 0
    raise BadItem(f"has a field of type {tag:#x}, which is none that is known")


cdef object decode(Cursor* cursor):
    cdef int tag = take(cursor, 1)[0]
    cdef int64_t nbytes, _i
    if tag == T_JSON:
        nbytes = le32(take(cursor, 4))
        return json_text((<const char*> take(cursor, nbytes))[:nbytes])
    if tag == T_TEXTS:
        return [take_text(cursor) for _i in range(take_count(cursor, 4))]
    if tag == T_INTS:
        return [sle64(take(cursor, 8)) for _i in range(take_count(cursor, 8))]
    if tag == T_FLOATS:
        return [take_float(cursor) for _i in range(take_count(cursor, 8))]
    if tag == T_BOOLS:
        return [take(cursor, 1)[0] != 0 for _i in range(take_count(cursor, 1))]
    if tag == T_DICT:
        return take_dict(cursor)
    if tag == T_RECORDS:
        return take_records(cursor)
    if tag == T_TEXT:
        return take_text(cursor)
    if tag == T_INT:
        return sle64(take(cursor, 8))
    if tag == T_FLOAT:
        return take_float(cursor)
    if tag == T_BOOL:
        return take(cursor, 1)[0] != 0
    if tag == T_NONE:
        return None
    raise BadItem(f"has a part of type {tag:#x}, which is none that is known")
