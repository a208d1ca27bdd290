# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""LitData items into objects: the size of each leaf, the leaves, and the containers around them, in one walk.

What a leaf says of itself is checked before a byte of it is used: nothing larger than the item is ever allocated.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Copy, PyDict_SetItem
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from .._bytes cimport le32, le64, sle64
from .._dlpack cimport DLPACK_UNUSED, DLManagedTensor, PyCapsule_New, describe, drop_unused

from .litdata_errors import BadItem

cdef extern from "Python.h":
    object PyObject_CallOneArg(object, object)

cdef enum NodeKind:
    N_DICT = 0
    N_LIST = 1
    N_TUPLE = 2
    N_CALL = 3

cdef enum:
    ALIGNMENT = 64  # bytes; what torch gives

cdef int64_t MOST_NBYTES = <int64_t> 1 << 62

INT, FLOAT, BOOL, TEXT, BYTES = K_INT, K_FLOAT, K_BOOL, K_TEXT, K_BYTES
TENSOR, FLAT_TENSOR, ARRAY, FLAT_ARRAY, CALL = K_TENSOR, K_FLAT_TENSOR, K_ARRAY, K_FLAT_ARRAY, K_CALL
DICT, LIST, TUPLE, MADE = N_DICT, N_LIST, N_TUPLE, N_CALL


cdef struct Cursor:
    const uint8_t* sizes
    const uint8_t* data
    Py_ssize_t leaf


cdef union Bits:
    uint64_t number
    double value


# ---- what items consist of


cdef class Node:
    """A container of the tree. ``children`` has a Node or, for a leaf, None."""
    cdef int kind
    cdef tuple keys
    cdef dict template  # of a dict: a copy of it has all keys, and room for them
    cdef list children
    cdef object make  # where the kind is N_CALL: a list of values to the container


def compile_tree(tree):
    """Make a Node of (kind, keys or callable, children), as litdata_tree gives them; None stands for a leaf."""
    cdef Node node
    if tree is None:
        return None
    node = Node()
    node.kind, detail, children = tree
    node.children = [compile_tree(child) for child in children]
    if node.kind == N_DICT:
        node.keys, node.template = detail, dict.fromkeys(detail)
    node.make = detail
    return node


cdef class Layout:
    """The leaves and the tree of a data set, compiled once.

    ``leaves``: for each (name, kind, number of the element type, callable). ``tree``: None for a leaf, or (kind,
    detail, children). ``elements``: rows for the element types of tensors, of NumPy arrays, and of the columns of int,
    float and bool: (itemsize, DLPack's (code, bits) or None, dtype, the same two of a column). ``new``: what makes a
    tensor and an array of a type that has no DLPack name, called with shape and dtype.
    """

    def __cinit__(self, leaves, tree, elements, new, from_dlpack):
        cdef Py_ssize_t i
        self.names = tuple(leaf[0] for leaf in leaves)
        self.count = len(leaves)
        self.kinds = <int*> malloc(max(1, self.count) * sizeof(int))
        self.numbers = <int*> malloc(max(1, self.count) * sizeof(int))
        if self.kinds == NULL or self.numbers == NULL:
            raise MemoryError
        self.calls = [leaf[3] for leaf in leaves]
        for i in range(self.count):
            self.kinds[i], self.numbers[i] = leaves[i][1], leaves[i][2]
        self.new_tensor, self.new_array = new
        self.dtypes, self.column_dtypes = [], []
        for i in range(3):
            set_elements(self, i, elements[i])
        for i in range(self.count):
            check_number(self, i)
        self.from_dlpack = from_dlpack
        self.root = compile_tree(tree)

    def __dealloc__(self):
        free(self.kinds)
        free(self.numbers)
        free(self.elements[0])
        free(self.elements[1])
        free(self.elements[2])

    def decode_bytes(self, bytes item not None):
        """Decode one item. Raises BadItem."""
        return self.decode(<const uint8_t*> PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item))

    cdef object decode(self, const uint8_t* item, int64_t nbytes):
        cdef Cursor cursor
        self.check_sizes(item, nbytes)
        cursor.sizes, cursor.data, cursor.leaf = item, item + 4 * self.count, 0
        return build(self, self.root, &cursor)

    cdef int check_sizes(self, const uint8_t* item, int64_t nbytes) except -1:
        if not sizes_agree(item, nbytes, self.count):
            raise BadItem(f"it has {nbytes} bytes, which is not what the sizes of its {self.count} leaves say")
        return 0

    # ---- leaves

    cdef object decode_leaf(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes):
        cdef int kind = self.kinds[leaf]
        cdef Bits bits
        if kind == K_INT:
            if nbytes != 8:
                raise self.bad_leaf(leaf, f"has {nbytes} bytes instead of 8")
            return sle64(data)
        if kind == K_FLOAT:
            if nbytes != 8:
                raise self.bad_leaf(leaf, f"has {nbytes} bytes instead of 8")
            bits.number = le64(data)
            return bits.value
        if kind == K_BOOL:
            if nbytes != 1:
                raise self.bad_leaf(leaf, f"has {nbytes} bytes instead of 1")
            return data[0] != 0
        if kind == K_TEXT:
            try:
                return PyUnicode_DecodeUTF8(<const char*> data, nbytes, NULL)
            except UnicodeDecodeError as error:
                raise self.bad_leaf(leaf, f"is not UTF-8 ({error.reason} at byte {error.start})") from None
        if kind == K_BYTES:
            return PyBytes_FromStringAndSize(<const char*> data, nbytes)
        if kind == K_CALL:
            return call_leaf(self, leaf, PyBytes_FromStringAndSize(<const char*> data, nbytes))
        return decode_array(self, leaf, data, nbytes)

    cdef int read_header(self, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes, Header* header) noexcept nogil:
        """Find type and shape of a leaf that is a tensor or an array, and see that its bytes are as many."""
        cdef int kind = self.kinds[leaf]
        cdef int which = table_of(kind)
        cdef bint big = kind == K_TENSOR
        cdef uint32_t number, rank
        cdef int64_t elements = 1, span, size, axis
        if kind == K_FLAT_TENSOR or kind == K_FLAT_ARRAY:
            header.number, header.rank, header.nbytes, header.data_nbytes = self.numbers[leaf], 1, 0, nbytes
            header.element = &self.elements[which][header.number]
            header.shape[0] = nbytes // header.element.itemsize
            return HEADER_OK if nbytes % header.element.itemsize == 0 else HEADER_NBYTES
        header.number = header.rank = 0
        if nbytes < 8:
            return HEADER_SHORT
        number, rank = load32(data, big), load32(data + 4, big)
        header.number, header.rank = <int> (number & 0x7fffffff), <int> (rank & 0x7fffffff)
        if number >= <uint32_t> self.element_count[which]:
            return HEADER_DTYPE
        if rank > MAX_RANK:
            return HEADER_RANK
        header.element = &self.elements[which][number]
        header.nbytes = 8 + 4 * <int64_t> rank
        if nbytes < header.nbytes:
            return HEADER_SHORT
        header.data_nbytes = nbytes - header.nbytes
        span = header.element.itemsize  # of what there would be if no axis were 0: strides are numbers even so
        for axis in range(rank):
            size = load32(data + 8 + 4 * axis, big)
            header.shape[axis] = size
            if size and span > MOST_NBYTES // size:
                return HEADER_NBYTES
            span *= max(size, 1)
            elements *= size
        if elements > header.data_nbytes // header.element.itemsize:
            return HEADER_NBYTES
        return HEADER_OK if elements * header.element.itemsize == header.data_nbytes else HEADER_NBYTES

    cdef object make_column(self, Py_ssize_t leaf, int64_t rows, Header* header, uint8_t** data):
        """Memory for a column of a batch, and where it is; the header (not of int, float, bool) is that of a leaf."""
        cdef int kind = self.kinds[leaf]
        cdef int which = W_SCALARS if kind <= K_BOOL else table_of(kind)
        cdef int number = kind if kind <= K_BOOL else header.number
        cdef ElementType* element = &self.elements[which][number]
        cdef int64_t shape[MAX_RANK + 1]
        cdef int axis, rank = 1 if kind <= K_BOOL else header.rank + 1
        shape[0] = rows
        for axis in range(1, rank):
            shape[axis] = header.shape[axis - 1]
        if element.column_bits:
            capsule = capsule_of(shape, rank, rows * (element.itemsize if kind <= K_BOOL else header.data_nbytes),
                                 element.column_code, element.column_bits, data)
            return PyObject_CallOneArg(self.from_dlpack, capsule)
        column = self.new_tensor(shape_of(shape, rank), self.column_dtypes[which][number])
        data[0] = <uint8_t*> <uintptr_t> address_of(column)
        return column

    # ---- what is said of bad ones

    cdef object bad_leaf(self, Py_ssize_t leaf, text):
        return BadItem(f"leaf {leaf} ({self.names[leaf]!r}) {text}")

    cdef object bad_header(self, Py_ssize_t leaf, int status, const Header* header, int64_t nbytes):
        if status == HEADER_SHORT:
            return self.bad_leaf(leaf, f"has {nbytes} bytes, too few for its type and shape")
        if status == HEADER_DTYPE:
            return self.bad_leaf(leaf, f"has element type {header.number}, which stands for none that is read")
        if status == HEADER_RANK:
            return self.bad_leaf(leaf, f"has {header.rank} axes, more than the {MAX_RANK} that there can be")
        return self.bad_leaf(
            leaf, f"has {header.data_nbytes} bytes of elements, which do not make the shape that it gives"
        )


cdef inline uint32_t load32(const uint8_t* p, bint big) noexcept nogil:
    if big:
        return (<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | p[3]
    return le32(p)


cdef int set_elements(Layout layout, Py_ssize_t which, rows) except -1:
    cdef Py_ssize_t i
    cdef ElementType* element
    layout.elements[which] = <ElementType*> calloc(max(1, len(rows)), sizeof(ElementType))
    if layout.elements[which] == NULL:
        raise MemoryError
    layout.element_count[which] = <int> len(rows)
    layout.dtypes.append([row[2] for row in rows])
    layout.column_dtypes.append([row[4] for row in rows])
    for i in range(len(rows)):
        element = &layout.elements[which][i]
        element.itemsize = rows[i][0]
        element.code, element.bits = rows[i][1] or (0, 0)
        element.column_code, element.column_bits = rows[i][3] or (0, 0)
    return 0


cdef int check_number(Layout layout, Py_ssize_t leaf) except -1:
    cdef int kind = layout.kinds[leaf]
    cdef int which = table_of(kind)
    if kind != K_FLAT_TENSOR and kind != K_FLAT_ARRAY:
        return 0
    if not 0 <= layout.numbers[leaf] < layout.element_count[which]:
        raise ValueError(f"leaf {leaf}: {layout.numbers[leaf]} is no element type")
    return 0


cdef object build(Layout layout, Node node, Cursor* cursor):
    cdef Py_ssize_t i, n
    if node is None:
        return next_leaf(layout, cursor)
    n = len(node.children)
    if node.kind == N_DICT:
        result = PyDict_Copy(node.template)
        for i in range(n):
            PyDict_SetItem(result, node.keys[i], build(layout, <Node> node.children[i], cursor))
        return result
    if node.kind == N_TUPLE:
        result = PyTuple_New(n)
        for i in range(n):
            value = build(layout, <Node> node.children[i], cursor)
            Py_INCREF(value)
            PyTuple_SET_ITEM(result, i, value)
        return result
    result = PyList_New(n)
    for i in range(n):
        value = build(layout, <Node> node.children[i], cursor)
        Py_INCREF(value)
        PyList_SET_ITEM(result, i, value)
    return result if node.kind == N_LIST else node.make(result)


cdef object next_leaf(Layout layout, Cursor* cursor):
    cdef int64_t nbytes = le32(cursor.sizes + 4 * cursor.leaf)
    value = layout.decode_leaf(cursor.leaf, cursor.data, nbytes)
    cursor.data += nbytes
    cursor.leaf += 1
    return value


cdef object call_leaf(Layout layout, Py_ssize_t leaf, payload):
    try:
        return layout.calls[leaf](payload)
    except BadItem as error:
        raise layout.bad_leaf(leaf, str(error)) from None


cdef object decode_array(Layout layout, Py_ssize_t leaf, const uint8_t* data, int64_t nbytes):
    cdef Header header
    cdef uint8_t* elements
    cdef int which = table_of(layout.kinds[leaf])
    cdef int status = layout.read_header(leaf, data, nbytes, &header)
    if status != HEADER_OK:
        raise layout.bad_header(leaf, status, &header, nbytes)
    data += header.nbytes
    if header.element.bits:
        capsule = capsule_of(header.shape, header.rank, header.data_nbytes, header.element.code, header.element.bits,
                             &elements)
        memcpy(elements, data, header.data_nbytes)
        return PyObject_CallOneArg(layout.from_dlpack, capsule)
    new = layout.new_array if which == W_ARRAYS else layout.new_tensor
    made = new(shape_of(header.shape, header.rank), layout.dtypes[which][header.number])
    if header.data_nbytes:
        memcpy(<void*> <uintptr_t> address_of(made), data, header.data_nbytes)
    return made


cdef inline int table_of(int kind) noexcept nogil:
    return W_ARRAYS if kind == K_ARRAY or kind == K_FLAT_ARRAY else W_TENSORS


cdef bint sizes_agree(const uint8_t* item, int64_t nbytes, Py_ssize_t leaves) noexcept nogil:
    """Whether an item has the bytes that the sizes at its beginning give its leaves."""
    cdef int64_t total = 4 * <int64_t> leaves
    cdef Py_ssize_t i
    if nbytes < total:
        return False
    for i in range(leaves):
        total += le32(item + 4 * i)
    return total == nbytes


cdef tuple shape_of(const int64_t* shape, int rank):
    return tuple([shape[axis] for axis in range(rank)])


cdef int64_t address_of(made) except -1:
    """Where the elements of a tensor or array that was just made lie."""
    cdef Py_buffer view
    if hasattr(made, "data_ptr"):
        return made.data_ptr()
    try:
        PyObject_GetBuffer(made, &view, PyBUF_WRITABLE | PyBUF_SIMPLE)
    except ValueError:  # NumPy exports no element types that others have added
        return made.__array_interface__["data"][0]
    try:
        return <int64_t> <uintptr_t> view.buf
    finally:
        PyBuffer_Release(&view)


def unflatten(Node tree, values):
    """Put one value for each leaf into the containers of a tree."""
    return fill_tree(tree, iter(values))


cdef object fill_tree(Node node, values):
    if node is None:
        return next(values)
    filled = [fill_tree(<Node> child, values) for child in node.children]
    if node.kind == N_DICT:
        return dict(zip(node.keys, filled))
    if node.kind == N_TUPLE:
        return tuple(filled)
    return filled if node.kind == N_LIST else node.make(filled)


# ---- tensors that own their memory: the description, shape, strides and elements lie in one allocation


cdef void free_all(DLManagedTensor* managed) noexcept nogil:
    free(managed)


cdef object capsule_of(const int64_t* shape, int rank, int64_t nbytes, int code, int bits, uint8_t** elements):
    """A DLPack capsule of a tensor whose elements, of ``nbytes`` together, the caller puts where ``elements`` says."""
    cdef int64_t before = sizeof(DLManagedTensor) + 2 * rank * sizeof(int64_t)
    cdef DLManagedTensor* managed
    cdef int64_t* sizes
    cdef int64_t stride = 1
    cdef int axis
    if nbytes > MOST_NBYTES:
        raise MemoryError
    managed = <DLManagedTensor*> malloc(before + ALIGNMENT + nbytes)
    if managed == NULL:
        raise MemoryError
    sizes = <int64_t*> (managed + 1)
    for axis in range(rank - 1, -1, -1):
        sizes[axis] = shape[axis]
        sizes[rank + axis] = stride
        stride *= max(shape[axis], 1)
    elements[0] = <uint8_t*> managed + before
    elements[0] += (ALIGNMENT - <int64_t> (<uintptr_t> elements[0] & (ALIGNMENT - 1))) & (ALIGNMENT - 1)
    describe(managed, elements[0], rank, sizes, sizes + rank, code, bits)
    managed.context, managed.deleter = NULL, free_all
    try:
        return PyCapsule_New(managed, DLPACK_UNUSED, drop_unused)
    except BaseException:
        free(managed)
        raise
