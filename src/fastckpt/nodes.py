"""Objects of a pickle that wait to be made: for tensors to be read, or for a framework.

The pickle machine makes nodes, a bridge turns each into the real thing once its arguments are there. A node never
imports or calls what the file names; the one that stands for an unknown class, Opaque, stays what it is.
"""

import collections
import enum

from ._spec import TensorSpec
from .dtypes import DTYPES, UINT8
from .errors import CheckpointError, FormatError, LimitError, short


class _Missing(enum.Enum):
    MISSING = "<missing>"  # an enum member stays one object when it is copied or pickled

    def __repr__(self):
        return self.value


MISSING = _Missing.MISSING


class Node:
    """An object with constructor arguments that come first and a state that comes last (it may lead back to it)."""

    __slots__ = ("args", "state")

    def __init__(self, args=()):
        self.args = args
        self.state = MISSING

    def set_state(self, machine, state):
        """What BUILD does to it."""
        self.state = state

    def build(self, bridge):
        """The object; ``args`` hold real objects by now."""
        raise NotImplementedError

    def apply_state(self, bridge, obj):
        """Give the built object its state."""
        raise NotImplementedError


class TensorNode(Node):
    """Anything of torch's that is not a plain strided tensor. ``kind`` names the bridge method that makes it."""

    __slots__ = ("kind",)

    def __init__(self, kind, *args):
        super().__init__(args)
        self.kind = kind

    def set_state(self, machine, state):
        """Attributes of tensors are arguments of the functions that make them; BUILD gives none."""
        raise FormatError(f"a state is given to {short(self)}, which has none")

    def build(self, bridge):
        return self.made_by(getattr(bridge, self.kind), *self.args)

    def apply_state(self, bridge, obj):
        if self.kind == "generator":
            self.made_by(bridge.set_state, self, obj, self.state)
        else:  # the class may be one that the user allowed, whose errors are his own
            bridge.set_state(self, obj, self.state)

    def made_by(self, make, *args):
        """The result of a call of the framework's, which may find that the arguments make no sense."""
        if self.kind in (
            "device_tensor",
            "from_type",
        ):  # a device or a class of the user's has a say
            return make(*args)
        try:
            return make(*args)
        except CheckpointError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            reason = str(error).partition("\n")[0]
            raise FormatError(
                f"what the pickle says of a {self.kind} makes none: {reason:.200}"
            ) from error

    def __repr__(self):
        args = repr(self.args) if self.kind in ("size", "device") else short(self.args)
        return f"<{self.kind} {args}>"


# What torch has besides tensors.
NO_TENSORS = ("size", "device", "generator")


def is_tensor(value):
    """Whether an inert object will be a tensor."""
    return isinstance(value, TensorSpec) or (
        isinstance(value, TensorNode) and value.kind not in NO_TENSORS
    )


class QuantizedNode(TensorNode):
    """A quantized tensor: ``spec`` says where its integers lie, the arguments how to read them."""

    __slots__ = ("spec",)

    def __init__(self, kind, spec, *args):
        super().__init__(kind, *args)
        self.spec = spec

    def build(self, bridge):
        return self.made_by(getattr(bridge, self.kind), self.spec, *self.args)


class TensorType(TensorNode):
    """A tensor of torch 0.1: an empty one, which BUILD gives its storage and geometry."""

    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__("typed_tensor", None, code)
        self.code = code

    def set_state(self, machine, state):
        if not isinstance(state, tuple) or len(state) != 4:
            raise FormatError(
                f"a tensor's state is {short(state)}, (storage, offset, size, stride) is expected"
            )
        spec = machine.tensor(*state)
        if spec.dtype != self.code:
            raise FormatError(
                f"a tensor of {DTYPES[self.code].name} lies in a storage of {DTYPES[spec.dtype].name}"
            )
        self.args = (spec, self.code)


class GeneratorNode(TensorNode):
    """A torch.Generator. torch itself does not look at what state it is given."""

    __slots__ = ()

    def set_state(self, machine, state):
        fits = (
            isinstance(state, tuple)
            and len(state) == 3
            and type(state[0]) is int
            and -(2**63) <= state[0] < 2**64
            and (state[1] is None or (type(state[1]) is int and 0 <= state[1] < 2**63))
            and isinstance(state[2], TensorSpec)
            and state[2].dtype == UINT8
            and len(state[2].shape) == 1
            and state[2].numel == state[2].extent
        )
        if not fits:
            raise FormatError(
                f"a Generator's state is {short(state)}, (seed, offset, tensor) is expected"
            )
        self.state = state


class ParameterNode(TensorNode):
    """An nn.Parameter: (data, requires_grad), and attributes as its state."""

    __slots__ = ()

    def __init__(self, data=None, requires_grad=True, kind="parameter"):
        super().__init__(kind, data, requires_grad)

    def set_state(self, machine, state):
        """torch 0.1 to 0.3 wrote (requires_grad, volatile, hooks); 2016 (data, ?, hooks, requires_grad, volatile)."""
        data = self.args[0]
        if isinstance(state, tuple) and len(state) == 3:
            requires_grad = state[0]
        elif isinstance(state, tuple) and len(state) == 5:
            data, _, _, requires_grad, _ = state
        elif isinstance(state, tuple) and len(state) == 4:
            data, requires_grad = state[0], state[1]
        else:
            raise FormatError(
                f"a Parameter's state is {short(state)}, a tuple of three or five is expected"
            )
        if type(requires_grad) is not bool:
            raise FormatError(
                f"a Parameter's requires_grad is {short(requires_grad)}, a bool is expected"
            )
        if data is not None and not is_tensor(data):
            raise FormatError(f"a Parameter's data is {short(data)}, a tensor is expected")
        self.args = (data, requires_grad)


class TorchName(Node):
    """A constant of torch's: a dtype, a layout, a tensor type. ``path`` is the way to it from the torch module."""

    __slots__ = ("path",)

    def __init__(self, path):
        super().__init__()
        self.path = path

    def build(self, bridge):
        return bridge.name(self.path)

    def __repr__(self):
        return f"<torch.{self.path}>"


class Opaque(Node):
    """An object of a class that is not known to be plain data, kept as what the file says of it; nothing was run.

    Attributes: ``qualname`` (module and name of the class or function, as the file spells it), ``args`` and ``kwargs`` of its
    constructor (args is None where the file names the class itself), ``state`` (MISSING if it has none), ``items`` and ``pairs``
    (what would be appended to it or set in it). Tensors among them are real tensors after ``load``.

    What a symbolic pickle needs to be written again: ``callee`` (the Global or Opaque that is called) and ``opcode`` (the one
    that calls it, or that refers to what has no name: EXT1, BINPERSID, STACK_GLOBAL of computed strings), whose ``args`` are
    whatever the pickle has there, nearly always a tuple. Pickles fill an object in one order: items, pairs, one state. What
    comes out of that order is in ``later``, as (opcode, state or items or flat pairs).
    """

    __slots__ = ("callee", "items", "kwargs", "later", "new", "opcode", "pairs", "qualname")

    def __init__(
        self,
        qualname,
        args=None,
        kwargs=None,
        state=MISSING,
        new=False,
        callee=None,
        opcode=None,
    ):
        super().__init__(args)
        self.qualname = qualname
        self.kwargs = kwargs or {}
        self.state = state
        self.items = []
        self.pairs = {}
        self.new = new  # made by cls.__new__(cls, *args), not by a call
        self.callee, self.opcode = callee, opcode
        self.later = ()  # a list where there is any

    def __repr__(self):
        args = "" if self.args is None else f", args={short(self.args)}"
        # A state may lead back here, or through a long chain.
        kind = type(self.state).__name__
        state = f"<{kind}>" if isinstance(self.state, Node) else short(self.state)
        state = "" if self.state is MISSING else f", state={state}"
        return f"Opaque({self.qualname!r}{args}{state})"

    def build(self, bridge):
        return bridge.opaque(self)

    def apply_state(self, bridge, obj):
        """Fill an object of a class that the user allowed, as the pickle would."""
        for item in self.items:
            (obj.append if hasattr(obj, "append") else obj.add)(item)
        for key, value in self.pairs.items():
            obj[key] = value
        if self.state is not MISSING:
            bridge.set_state(self, obj, self.state)


def duplicate(value):
    """A copy of an inert object that shares no container or node with it; specs and plain values are the same ones.

    What occurs twice occurs twice in the copy. Recursion goes as deep as the object nests: LimitError where that is too deep.
    """
    try:
        return _duplicate(value, {})
    except RecursionError:
        raise LimitError(
            "a tensor's attributes nest too deep for it to be read alone; load the whole object"
        ) from None


def _duplicate(value, memo):
    make = _duplicate_node if isinstance(value, Node) else _DUPLICATORS.get(type(value))
    if make is None:
        return value
    if id(value) not in memo:
        make(value, memo)
    return memo[id(value)]


def _duplicate_node(node, memo):
    copied = memo[id(node)] = object.__new__(type(node))
    for cls in type(node).__mro__[:-1]:
        for name in cls.__slots__:
            setattr(copied, name, _duplicate(getattr(node, name), memo))


def _duplicate_list(value, memo):
    copied = memo[id(value)] = value.copy()
    copied.clear()
    copied.extend(_duplicate(member, memo) for member in value)


def _duplicate_dict(value, memo):
    cls = type(
        value
    )  # by its methods: attributes of an OrderedDict, which the file sets, may go by their names
    copied = memo[id(value)] = cls.copy(value)
    cls.clear(copied)
    for key, member in cls.items(value):
        copied[_duplicate(key, memo)] = _duplicate(member, memo)
    if hasattr(value, "__dict__"):
        vars(copied).update(_duplicate(vars(value), memo))


def _duplicate_frozen(value, memo):
    memo[id(value)] = type(value)([_duplicate(member, memo) for member in value])


_DUPLICATORS = {
    list: _duplicate_list,
    collections.deque: _duplicate_list,
    dict: _duplicate_dict,
    collections.OrderedDict: _duplicate_dict,
    collections.defaultdict: _duplicate_dict,
    collections.Counter: _duplicate_dict,
    tuple: _duplicate_frozen,
    frozenset: _duplicate_frozen,
    set: _duplicate_frozen,
}
