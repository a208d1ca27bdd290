# cython: language_level=3
"""What the opcodes of a pickle mean, on the machine's stack."""

from libc.stdint cimport int64_t, uint8_t

from ._keys cimport Keys
from ._spec cimport Global, TensorSpec
from ._stack cimport Stack
from ._storages cimport Storages

# What a persistent id may be.
cdef enum:
    NONE_ALLOWED = 0
    ZIP_STORAGES = 1
    LEGACY_STORAGES = 2
    TAR_OBJECTS = 3


cdef class Objects(Stack):
    cdef const uint8_t* start
    cdef const uint8_t* op_at  # the opcode being executed, for messages
    cdef int pids
    cdef dict tar_objects
    cdef int64_t copies_left
    cdef Keys keys  # None: nothing is checked
    cdef bint tolerant, symbolic
    cdef object observe  # what is told of each name, call and change; or None
    cdef dict globals_
    cdef readonly Storages described
    cdef readonly list names, unknown
    cdef readonly dict touched  # id of an object -> (it, an Opaque with what is done to it)

    cpdef int spend(self, Py_ssize_t count) except -1
    cdef int check_key(self, object key) except -1
    cdef TensorSpec add_tensor(self, object ref, object dtype, object offset, object size, object stride,
                               bint requires_grad)
    cpdef object call(self, object callee, tuple args)
    cdef object call_or_keep(self, Global name, tuple args)
    cdef int note(self, object subject, object detail) except -1
    cdef object symbol(self, object callee, object args, object kwargs)
    cdef object unnamed(self, str what, tuple args)
    cdef object stand_in(self, object target)
    cdef int change(self, object target, object values) except -1
    cdef int add_later(self, held, str opcode, values) except -1
    cdef object rebuild(self, Global name, tuple args)
    cdef TensorSpec dense(self, tuple args, object dtype, bint requires_grad)
    cdef object persistent(self, object pid)
    cdef object resolved(self, object pid)
    cdef object named(self, object module, object name)
    cdef int append_all(self, object target, Py_ssize_t at) except -1
    cdef int set_all(self, object target, Py_ssize_t at) except -1
    cdef int add_all(self, object target, Py_ssize_t at) except -1
    cdef int build(self, object target, object state) except -1
    cdef int set_state(self, object target, object state) except -1
    cdef object new_object(self, object cls, object args, object kwargs)
