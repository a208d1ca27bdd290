# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The record of each storage, for tens of thousands of them."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE
from libc.stdint cimport int64_t

from ._held cimport Held, hold, release
from ._spec cimport StorageSpec, TensorSpec

from .dtypes import DTYPES

MISSING_RECORD, WRONG_SIZE = 1, 2
cdef tuple ITEMSIZES = tuple(dtype.itemsize for dtype in DTYPES)


def match_rows(list storages, dict rows, nbytes, found):
    """Look up the row of each storage and put it into ``found``, an int64 column as long as ``storages``.

    ``rows`` maps storage keys to rows, ``nbytes`` is the int64 column of record sizes by row. A record may be longer
    than its storage by less than one item. Returns (0, 0), or (MISSING_RECORD or WRONG_SIZE, position in ``storages``).
    """
    cdef Held held
    cdef StorageSpec storage
    cdef const int64_t* nbytes_at
    cdef int64_t* found_at
    cdef int64_t spare
    cdef Py_ssize_t i
    held.count = 0
    try:
        nbytes_at = <const int64_t*> hold(&held, nbytes, PyBUF_SIMPLE, -1)
        found_at = <int64_t*> hold(&held, found, PyBUF_WRITABLE, len(storages) * 8)
        for i in range(len(storages)):
            storage = storages[i]
            row = rows.get(storage.key)
            if row is None:
                return MISSING_RECORD, i
            found_at[i] = row
            spare = nbytes_at[found_at[i]] - storage.nbytes
            if spare < 0 or spare and spare >= <int64_t> ITEMSIZES[storage.dtype]:
                return WRONG_SIZE, i
    finally:
        release(&held)
    return 0, 0


def roots_of(list storages):
    """The storages that have bytes of their own, each once, by index: slices lie in their roots."""
    cdef StorageSpec storage
    cdef dict found = {}
    for storage in storages:
        if storage.root is not None:
            storage = storage.root
        found[storage.index] = storage
    return list(found.values())


def with_bytes(list storages):
    """Those that have bytes in the file: not empty, and not tagged with the meta device."""
    cdef StorageSpec storage
    return [storage for storage in storages if storage.nbytes and storage.location != "meta"]


def largest_items(list storages, list tensors, itemsize):
    """Put into an int64 column, by storage index, the size of the largest item that a tensor sees in each storage."""
    cdef Held held
    cdef StorageSpec storage
    cdef TensorSpec tensor
    cdef int64_t* itemsize_at
    cdef int64_t size
    cdef Py_ssize_t n = len(itemsize)
    held.count = 0
    try:
        itemsize_at = <int64_t*> hold(&held, itemsize, PyBUF_WRITABLE, n * 8)
        for storage in storages:
            itemsize_at[storage.index] = ITEMSIZES[storage.dtype]
        for tensor in tensors:
            storage = tensor.storage if tensor.storage.root is None else tensor.storage.root
            size = ITEMSIZES[tensor.dtype]
            if size > itemsize_at[storage.index]:
                itemsize_at[storage.index] = size
    finally:
        release(&held)
