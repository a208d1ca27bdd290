# cython: language_level=3
"""What the items of one LitData data set consist of, for native code that decodes many of them."""

from libc.stdint cimport int64_t, uint8_t

cdef enum Kind:
    K_INT = 0  # <q
    K_FLOAT = 1  # <d
    K_BOOL = 2  # one byte
    K_TEXT = 3  # UTF-8
    K_BYTES = 4
    K_TENSOR = 5  # a header of big-endian u32, then the elements
    K_FLAT_TENSOR = 6  # the elements alone, of one axis
    K_ARRAY = 7  # as K_TENSOR, little-endian, a NumPy array
    K_FLAT_ARRAY = 8
    K_CALL = 9  # whatever a callable makes of the bytes
    MAX_RANK = 32  # what every NumPy can hold

cdef enum HeaderStatus:
    HEADER_OK = 0
    HEADER_SHORT = 1
    HEADER_DTYPE = 2
    HEADER_RANK = 3
    HEADER_NBYTES = 4


cdef enum Which:
    """The tables of element types."""
    W_TENSORS = 0
    W_ARRAYS = 1
    W_SCALARS = 2  # columns of int, float and bool


cdef struct ElementType:
    int64_t itemsize
    int code, bits  # DLPack's names of it; bits 0: it is not made through DLPack
    int column_code, column_bits


cdef struct Header:
    const ElementType* element
    int number  # of the element type
    int rank
    int64_t nbytes  # of the header
    int64_t data_nbytes
    int64_t shape[MAX_RANK]


cdef class Layout:
    cdef readonly tuple names  # of the leaves, as index.json has them
    cdef readonly Py_ssize_t count  # of leaves
    cdef int* kinds
    cdef int* numbers  # of the element types of flat leaves
    cdef list calls
    cdef object root
    cdef ElementType* elements[3]
    cdef int element_count[3]
    cdef list dtypes  # by table and number
    cdef list column_dtypes
    cdef object from_dlpack
    cdef object new_tensor, new_array  # (shape, dtype) to an uninitialized one

    cdef object decode(self, const uint8_t* item, int64_t nbytes)
    cdef object decode_leaf(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes)
    cdef int check_sizes(self, const uint8_t* item, int64_t nbytes) except -1
    cdef int read_header(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes, Header* header) noexcept nogil
    cdef object make_column(self, Py_ssize_t leaf, int64_t rows, Header* header, uint8_t** data)
    cdef object bad_leaf(self, Py_ssize_t leaf, text)
    cdef object bad_header(self, Py_ssize_t leaf, int status, const Header* header, int64_t nbytes)


cdef bint sizes_agree(const uint8_t* item, int64_t nbytes, Py_ssize_t leaves) noexcept nogil
