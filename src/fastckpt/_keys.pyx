# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: freethreading_compatible=True
"""Dict keys and set members, checked before they are put in: what hashing and comparing them costs is bounded.

A tuple may hold one tuple twice, and so on down, and has 2**depth members to hash. Python's hashes of numbers, and of
tuples of numbers, are known: a file may have a hundred thousand keys of one hash, and each is compared with all others.
Texts have hashes that nobody knows beforehand.
"""

cimport cython

from .errors import LimitError

cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object, int* overflow) except? -1
    bint PyLong_Check(object)
    bint PyUnicode_Check(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)

cdef enum:
    # A member of a key takes a byte at least; memo entries make it occur again, honestly some times.
    ITEMS_PER_BYTE = 4
    ITEMS = 1000000

# An int is its own hash below this, sys.hash_info.modulus, on 64-bit machines.
cdef long long MODULUS = (1 << 61) - 1


@cython.final
cdef class Keys:
    """The keys of one pickle of ``nbytes`` bytes, or of the object that it becomes.

    Without ``nbytes`` the work of hashing is not counted: whoever made the keys has counted it.
    """

    def __init__(self, limits, nbytes=None):
        self.by_hash, self.items = {}, None
        self.max_depth, self.max_collisions = limits.key_depth, limits.key_collisions
        if nbytes is not None:
            self.items = limits.key_items
            if self.items is None:
                self.items = max(ITEMS, ITEMS_PER_BYTE * nbytes)
            self.items_left = self.items

    cdef int check(self, object key) except -1:
        """Raise LimitError where hashing the key, or comparing it with others, is out of proportion."""
        cdef int overflow = 0
        cdef long long number
        if PyUnicode_Check(key):
            return self.count(PyUnicode_GET_LENGTH(key) // LONG_TEXT)
        if PyLong_Check(key):
            number = PyLong_AsLongLongAndOverflow(key, &overflow)
            if not overflow and -MODULUS < number < MODULUS:
                return 0
            self.count(key.bit_length() // 64)
        elif isinstance(key, (tuple, frozenset)):
            self.count_members(key, 0)
        elif isinstance(key, bytes):
            return self.count(len(<bytes> key) // LONG_TEXT)
        return self.tell_apart(key)

    cdef int count(self, int64_t items) except -1:
        if self.items is not None:
            self.items_left -= items
            if self.items_left < 0:
                raise LimitError(f"hashing the keys of this pickle would visit more than {self.items} objects "
                                 f"(Limits.key_items raises the bound)")
        return 0

    cdef int count_members(self, object key, Py_ssize_t level) except -1:
        if level > self.max_depth:
            raise LimitError(f"a dict key or set member nests more than {self.max_depth} deep "
                             f"(Limits.key_depth raises the bound)")
        for member in key:
            self.count(1)
            if isinstance(member, (tuple, frozenset)):
                self.count_members(member, level + 1)
            elif isinstance(member, (str, bytes)):
                self.count(len(member) // LONG_TEXT)
            elif PyLong_Check(member):
                self.count(member.bit_length() // 64)
        return 0

    cdef int tell_apart(self, object key) except -1:
        """Count the different keys of one hash. Honest ones have some: hash(-1) is hash(-2), also in tuples."""
        key_hash = hash(key)
        found = self.by_hash.get(key_hash)
        if found is None:
            self.by_hash[key_hash] = key
            return 0
        if type(found) is not list:
            if found is key or found == key:
                return 0
            found = self.by_hash[key_hash] = [found]
        if key not in found:
            if len(<list> found) > self.max_collisions:
                raise LimitError(f"more than {self.max_collisions} different keys have one hash, dicts get slow "
                                 f"(Limits.key_collisions raises it)")
            (<list> found).append(key)
        return 0
