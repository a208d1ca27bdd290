# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""LitData items stacked: each leaf goes from the item's bytes to its row of one tensor, and no object is made of it.

The first item says what shapes and types the columns have. An item that differs ends it with Uneven: the caller then
looks at the samples one by one, and whoever collates those says what does not fit.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from .._bytes cimport le32
from ._litdata_layout cimport (
    HEADER_OK, K_BOOL, K_BYTES, K_CALL, K_FLOAT, K_INT, K_TEXT, Header, Layout,
)

from .litdata_errors import Uneven

cdef int64_t MOST = <int64_t> 1 << 62


cdef class Batch:
    """``rows`` samples, by leaf in ``columns``: a tensor or array, or a list of text, bytes or what a callable decodes.
    """

    def __cinit__(self, Layout layout not None, int64_t rows):
        self.layout, self.rows, self.columns = layout, rows, []
        self.places = <Column*> calloc(max(1, layout.count), sizeof(Column))
        if self.places == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.places)

    cdef int prepare(self, const uint8_t* item, int64_t nbytes) except -1:
        """Make the columns that the first item is a row of."""
        cdef Py_ssize_t leaf
        cdef const uint8_t* data = item + 4 * self.layout.count
        self.layout.check_sizes(item, nbytes)
        for leaf in range(self.layout.count):
            self.prepare_column(leaf, data, le32(item + 4 * leaf))
            data += le32(item + 4 * leaf)
        self.ready = True
        return 0

    cdef int prepare_column(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes) except -1:
        cdef Header header
        cdef Column* place = self.places + leaf
        cdef int kind = self.layout.kinds[leaf], status
        if kind == K_TEXT or kind == K_BYTES or kind == K_CALL:
            self.columns.append([None] * self.rows)
            self.has_objects = True
            return 0
        if kind == K_INT or kind == K_FLOAT or kind == K_BOOL:
            place.row_nbytes = place.leaf_nbytes = 1 if kind == K_BOOL else 8
            place.is_bool = kind == K_BOOL
        else:
            status = self.layout.read_header(leaf, data, nbytes, &header)
            if status != HEADER_OK:
                raise self.layout.bad_header(leaf, status, &header, nbytes)
            if header.data_nbytes and self.rows > MOST // header.data_nbytes:
                raise MemoryError
            place.row_nbytes, place.leaf_nbytes, place.header_nbytes = header.data_nbytes, nbytes, header.nbytes
            memcpy(place.header, data, header.nbytes)
        self.columns.append(self.layout.make_column(leaf, self.rows, &header, &place.data))
        place.is_stacked = True
        return 0

    cdef bint stack(self, int64_t row, const uint8_t* item, int64_t nbytes) noexcept nogil:
        """Copy one item into its row; True: it is bad, or has another shape than the first."""
        cdef Py_ssize_t leaf, leaves = self.layout.count
        cdef const uint8_t* data = item + 4 * leaves
        cdef int64_t size, left = nbytes - 4 * <int64_t> leaves
        cdef Column* place = self.places
        if left < 0:
            return True
        for leaf in range(leaves):
            size = le32(item + 4 * leaf)
            if size > left:
                return True
            if place.is_stacked:
                if size != place.leaf_nbytes or memcmp(data, place.header, place.header_nbytes) != 0:
                    return True
                if place.is_bool:
                    place.data[row] = data[0] != 0
                elif place.row_nbytes == 8:
                    memcpy(place.data + 8 * row, data + place.header_nbytes, 8)
                elif place.row_nbytes:
                    memcpy(place.data + place.row_nbytes * row, data + place.header_nbytes, place.row_nbytes)
            data += size
            left -= size
            place += 1
        return left != 0

    cdef int refuse(self, const uint8_t* item, int64_t nbytes) except -1:
        """Raise what is wrong with an item that could not be stacked."""
        self.layout.decode(item, nbytes)
        raise Uneven

    cdef int list_objects(self, int64_t row, const uint8_t* item) except -1:
        """Put the leaves of an item that cannot be stacked into their lists."""
        cdef Py_ssize_t leaf
        cdef const uint8_t* data = item + 4 * self.layout.count
        for leaf in range(self.layout.count):
            if not self.places[leaf].is_stacked:
                (<list> self.columns[leaf])[row] = self.layout.decode_leaf(leaf, data, le32(item + 4 * leaf))
            data += le32(item + 4 * leaf)
        return 0
