# cython: language_level=3, boundscheck=False, initializedcheck=False
# cython: freethreading_compatible=True
"""Turn the inert object of a pickle into the real one, in place, and give its tensors names.

Containers keep their identity, so sharing and cycles stay what they are; nesting of any depth takes no recursion.
Only the arguments of nodes recurse, to a bound, since an object cannot be made before its arguments.
"""

import argparse
import collections
import types

from cpython.dict cimport PyDict_CheckExact, PyDict_Next, PyDict_SetItem
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF

from ._keys cimport Keys
from ._spec cimport Global, StorageRef, TensorSpec

from .errors import FormatError, LimitError, short
from .limits import Limits
from .nodes import MISSING, Node, Opaque, is_tensor

cdef extern from *:
    """
    /* Python 3.14 and later remember the hash of a tuple in it. */
    #if PY_VERSION_HEX >= 0x030E0000
    #define FORGET_HASH(value) (((PyTupleObject *)(value))->ob_hash = -1)
    #else
    #define FORGET_HASH(value) ((void)(value))
    #endif
    """
    void FORGET_HASH(PyObject*)

cdef extern from "Python.h":
    void PyTuple_SET_ITEM(PyObject*, Py_ssize_t, PyObject*)
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t)

cdef enum:
    ATOM = 0
    LIST = 1
    TUPLE = 2
    DICT = 3  # and its subclasses
    SET = 4
    FROZENSET = 5
    DEQUE = 6
    NAMESPACE = 7
    TENSOR = 8
    STORAGE = 9
    NAME = 10
    NODE = 11

cdef enum:
    # Paths of leaves at every level of deep nesting would take memory in its square.
    MAX_PATH_ITEMS = 1 << 22
    HONEST_DEPTH = 100
    # Keys in the paths of members of containers that are walked again under another path. One that holds another
    # twice, and so on down, has exponentially many paths.
    MAX_REPEATED_KEYS = 4000000
    MAX_SHARED_ATTRIBUTES = 1000000

cdef dict KINDS = {
    list: LIST, tuple: TUPLE, dict: DICT, collections.OrderedDict: DICT, collections.defaultdict: DICT,
    collections.Counter: DICT, set: SET, frozenset: FROZENSET, collections.deque: DEQUE,
    argparse.Namespace: NAMESPACE, types.SimpleNamespace: NAMESPACE,
    TensorSpec: TENSOR, StorageRef: STORAGE, Global: NAME,
    str: ATOM, int: ATOM, float: ATOM, bool: ATOM, type(None): ATOM, bytes: ATOM,
}  # fmt: skip


cdef int kind_of(object value):
    kind = KINDS.get(type(value))
    if kind is not None:
        return kind
    return NODE if isinstance(value, Node) else ATOM


cdef class Substitution:
    """One walk. ``work`` are containers whose members are still inert, ``begun`` those that are filled or being filled,
    ``keyed`` the tuples among them that are filled all the way down."""

    cdef object bridge
    cdef list tensors, work, alive
    cdef dict done
    cdef set begun, keyed, applied  # applied: ids of states
    cdef Py_ssize_t attributes_left
    cdef int depth, max_depth
    cdef Keys keys
    cdef bint lazy  # the bridge wants nodes of tensors as they are

    def __init__(self, bridge, list tensors, limits):
        self.bridge, self.tensors = bridge, tensors
        self.max_depth, self.keys = limits.object_depth, Keys(limits)
        self.lazy = hasattr(bridge, "lazy")
        self.work, self.alive, self.done, self.begun, self.keyed = [], [], {}, set(), set()
        self.applied, self.attributes_left = set(), MAX_SHARED_ATTRIBUTES

    cdef object resolve(self, object value):
        """What takes the place of a value; a container is the same one, and its members follow."""
        cdef int kind = kind_of(value)
        if kind == ATOM:
            return value
        if kind == TENSOR:
            return self.tensors[(<TensorSpec> value).index]
        if kind == NODE:
            return self.node(value)
        if kind == STORAGE:
            return self.bridge.storage(value)
        if kind == NAME:
            return self.bridge.named(value)
        if kind == FROZENSET:
            return self.key(value)
        self.schedule(value)
        return value

    cdef int schedule(self, object container) except -1:
        # A container that waits in an outer list waits here as well: what is being built may look into it.
        if id(container) not in self.begun:
            self.work.append(container)
        return 0

    cdef object node(self, object node):
        found = self.done.get(id(node))
        if found is not None:
            if found is MISSING:
                raise FormatError(f"{short(node)} is among its own arguments")
            return found
        self.alive.append(node)
        if isinstance(node, Opaque) and self.bridge.keeps(node):
            self.done[id(node)] = node
            self.work.append(node)
            return node
        if self.lazy and is_tensor(node):
            built = self.done[id(node)] = self.bridge.lazy(node)
            return built
        self.done[id(node)] = MISSING
        if self.depth >= self.max_depth:
            raise LimitError(f"objects nest more than {self.max_depth} deep in one another "
                             f"(Limits.object_depth raises the bound)")
        self.depth += 1
        outer, self.work = self.work, []
        built = self.done[id(node)] = self.build(node)
        if isinstance(node, Opaque) or node.state is not MISSING:
            self.give_state(node, built)
        self.work = outer
        self.depth -= 1
        return built

    cdef object build(self, object node):
        """Make the object of a node after all that its arguments hold."""
        if node.args:
            node.args = tuple([self.resolve(arg) for arg in node.args])
        if isinstance(node, Opaque):
            node.kwargs = {name: self.resolve(value) for name, value in node.kwargs.items()}
        self.drain()
        return node.build(self.bridge)

    cdef int give_state(self, object node, object built) except -1:
        """Apply the state at once, as the pickle did: a set may be about to hash the object by its attributes."""
        if isinstance(node, Opaque):
            self.schedule(node.items)
            self.schedule(node.pairs)
        node.state = self.resolve(node.state)
        self.drain()
        self.count_state(node.state)
        node.apply_state(self.bridge, built)
        return 0

    cdef int count_state(self, object state) except -1:
        """Bound what is copied: thousands of objects may have one dict of thousands of attributes as their state."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict) and id(part) in self.applied:
                self.attributes_left -= len(part)
            self.applied.add(id(part))
        if self.attributes_left < 0:
            raise LimitError(f"objects share their attributes, more than {MAX_SHARED_ATTRIBUTES} in all")
        return 0

    cdef object key(self, object value):
        """What takes the place of a dict key or a set's member. All that it holds is made at once, to be hashed."""
        cdef int kind = kind_of(value)
        if kind == TUPLE and id(value) not in self.keyed:
            self.keyed.add(id(value))
            self.begun.add(id(value))
            self.alive.append(value)
            self.fill_tuple(value, True)
        if kind == FROZENSET:
            return self.frozen(value)
        return value if kind == TUPLE else self.resolve(value)

    cdef object frozen(self, object value):
        """A frozenset of the real members. Theirs is another hash, and so has a tuple that changes in place."""
        found = self.done.get(id(value))
        if found is None:
            self.alive.append(value)
            members = [self.key(member) for member in value]
            plain = all([kind_of(member) == ATOM for member in value])
            found = value if plain else frozenset([self.hashable(member) for member in members])
            self.done[id(value)] = found
        return found

    cdef int drain(self) except -1:
        while self.work:
            self.fill(self.work.pop())
        return 0

    cdef int fill(self, object container) except -1:
        """Resolve the members of one container."""
        cdef int kind = kind_of(container)
        cdef Py_ssize_t i
        if id(container) in self.begun:
            return 0
        self.begun.add(id(container))
        self.alive.append(container)  # an id means nothing once its object is gone
        if kind == LIST:
            for i in range(len(container)):
                value = container[i]
                new = self.resolve(value)
                if new is not value:
                    container[i] = new
        elif kind == TUPLE:
            self.fill_tuple(container, False)
        elif kind == DICT:
            self.fill_dict(container)
            if not PyDict_CheckExact(container) and getattr(container, "__dict__", None):
                self.fill_dict(container.__dict__)
        elif kind == SET:
            members = [self.key(member) for member in container]
            container.clear()
            for member in members:
                container.add(self.hashable(member))
        elif kind == DEQUE:
            members = [self.resolve(member) for member in container]
            container.clear()
            container.extend(members)
        elif kind == NAMESPACE:
            self.fill_dict(container.__dict__)
        elif kind == NODE:  # an Opaque that stays one
            container.args = None if container.args is None else tuple([self.resolve(a) for a in container.args])
            container.state = self.resolve(container.state)
            self.schedule(container.kwargs)
            self.schedule(container.items)
            self.schedule(container.pairs)
        return 0

    cdef int fill_tuple(self, tuple container, bint as_key) except -1:
        """Tuples change in place, too: nobody has seen this one yet, and what holds it need not be found."""
        cdef Py_ssize_t i
        for i in range(len(container)):
            value = <object> PyTuple_GET_ITEM(container, i)
            new = self.key(value) if as_key else self.resolve(value)
            if new is not value:
                Py_INCREF(new)
                PyTuple_SET_ITEM(<PyObject*> container, i, <PyObject*> new)
                Py_DECREF(value)
        FORGET_HASH(<PyObject*> container)
        return 0

    cdef int fill_dict(self, object container) except -1:
        cdef Py_ssize_t at = 0
        cdef PyObject* key_at
        cdef PyObject* value_at
        cdef bint rebuild = False
        while PyDict_Next(container, &at, &key_at, &value_at):
            key = <object> key_at
            if type(key) is not str and kind_of(key) != ATOM:
                rebuild = True
                break
            value = <object> value_at
            new = self.resolve(value)
            if new is not value:
                PyDict_SetItem(container, key, new)  # an existing key: the table does not move
        if rebuild:
            # By the methods of its class: attributes of an OrderedDict, which the file sets, may go by their names.
            cls = type(container)
            items = list(cls.items(container))
            cls.clear(container)
            for key, value in items:
                cls.__setitem__(container, self.hashable(self.key(key)), self.resolve(value))
        return 0

    cdef object hashable(self, object key):
        """A key that can be one. Where an inert one can, the real one need not: an array, say."""
        if KINDS.get(type(key), NODE) != ATOM:  # those were checked when they were read
            try:
                self.keys.tell_apart(key)
            except TypeError as error:
                raise FormatError(f"a dict key or a set's member is {type(key).__name__}: {error}") from None
        return key

    cdef object run(self, object root):
        holder = [root]
        self.work.append(holder)
        self.drain()
        return holder[0]


def substitute(root, bridge, list tensors, limits=None):
    """The real object for an inert ``root``, made in place.

    ``tensors[spec.index]`` takes the place of a TensorSpec; ``bridge`` makes everything else (see torch_bridge).
    Raises LimitError where nodes nest too deep or too many keys have one hash, and what the bridge raises.
    """
    cdef Substitution walk = Substitution(bridge, tensors, limits or Limits())
    return walk.run(root)


def children(value):
    """(key, member) of a container, an Opaque or a node with members; None for a leaf."""
    cdef int kind = kind_of(value)
    if kind == DICT:
        extra = getattr(value, "__dict__", None)
        members = type(value).items(value)  # an attribute of it may be called items
        return [*members, *extra.items()] if extra else members
    if kind == LIST or kind == TUPLE or kind == DEQUE:
        return enumerate(value)
    if kind == NAMESPACE:
        return value.__dict__.items()
    if kind == SET or kind == FROZENSET:
        return enumerate(value)
    if kind == NODE and isinstance(value, Opaque):
        state = value.state
        found = [("args", value.args)] if value.args else []
        found += list(state.items()) if isinstance(state, dict) else [("state", state)] if state is not MISSING else []
        return found + list(value.kwargs.items()) + list(enumerate(value.items)) + list(value.pairs.items())
    return None


cdef Py_ssize_t size_of(object container):
    """About how many members a container has."""
    return len(container) if isinstance(container, (list, tuple, dict, set, frozenset)) else 1


cdef list walked(object root, bint tensors_only):
    """[(path, leaf)], see named_leaves."""
    cdef list found = [], keys = [], stack, inside = []
    cdef set seen = set(), open_ids = set()
    cdef Py_ssize_t path_items = 0, repeats_left = MAX_REPEATED_KEYS
    stack = [iter([(None, root)])]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            if keys:
                keys.pop()
                open_ids.discard(inside.pop())
            continue
        key, value = step
        members = children(value)
        if members is not None:
            if id(value) in open_ids:
                continue  # a cycle
            if id(value) in seen:
                # Under each of its paths, as long as that is no more than an honest object can have.
                repeats_left -= (size_of(value) + 1) * (len(keys) + 1)
                if repeats_left < 0:
                    continue
            seen.add(id(value))
            open_ids.add(id(value))
            inside.append(id(value))
            keys.append(key)
            stack.append(iter(members))
        elif not tensors_only or is_tensor(value):
            path_items += len(keys)
            if path_items > MAX_PATH_ITEMS and len(keys) > HONEST_DEPTH:
                raise LimitError(f"the names of this object's tensors have {len(keys)} parts and more; load it whole")
            found.append(((*keys[1:], key) if keys else (), value))
    return found


def named_leaves(root):
    """[(path, leaf)] of everything that is not a container, in the order of the object; a path is a tuple of keys.

    A container that occurs twice is walked under each of its paths (up to four million keys in such paths), a cycle
    ends where it closes. Raises LimitError where nesting is so deep that the paths would take memory out of proportion.
    """
    return walked(root, False)


def is_flat(root):
    """Whether an object is a plain dict of tensors by name, as a state dict is."""
    if type(root) is not dict and type(root) is not collections.OrderedDict:
        return False
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    while PyDict_Next(root, &at, &key, &value):
        if type(<object> value) is not TensorSpec or type(<object> key) is not str:
            return False
    return not named_tensors(getattr(root, "__dict__", None))  # a module's state dict has versions there


def named_tensors(root):
    """The tensors among ``named_leaves``: TensorSpecs and the nodes of other layouts."""
    cdef list found = []
    if type(root) is dict:  # the flat state dict, which has tens of thousands of entries
        for key, value in (<dict> root).items():
            if type(value) is not TensorSpec:
                break
            found.append(((key,), value))
        else:
            return found
    return walked(root, True)


def place(root, tuple path, tensor):
    """Put a tensor where a path of ``named_tensors`` leads in an inert object; gives what is the root then.

    What stands in a set, and what has been placed already under another path, stays.
    """
    if not path:
        return tensor
    container = root
    for key in path[:-1]:
        container = member(container, key)
    if is_tensor(member(container, path[-1])):
        put(container, path[-1], tensor)
    return root


cdef object member(object container, object key):
    """What ``children`` gives by that key; None where there is no such thing any more."""
    cdef int kind = kind_of(container)
    if kind == LIST or kind == TUPLE or kind == DEQUE:
        return container[key]
    if kind == DICT and key in container:
        return container[key]
    return getattr(container, "__dict__", {}).get(key) if kind == DICT or kind == NAMESPACE else None


cdef int put(object container, object key, object value) except -1:
    cdef int kind = kind_of(container)
    if kind == TUPLE:
        old = container[key]
        Py_INCREF(value)
        PyTuple_SET_ITEM(<PyObject*> container, key, <PyObject*> value)
        Py_DECREF(old)
        FORGET_HASH(<PyObject*> container)
    elif kind == LIST or kind == DEQUE or kind == DICT and key in container:
        container[key] = value
    else:
        container.__dict__[key] = value
    return 0


def leaves(root, set seen):
    """The leaves alone, without their paths, and those in keys; ``seen`` are ids of containers walked before."""
    cdef list found = [], todo = [root]
    while todo:
        value = todo.pop()
        members = children(value)
        if members is None:
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            for key, member in members:
                todo.append(member)
                if kind_of(key) != ATOM:
                    todo.append(key)
    return found
