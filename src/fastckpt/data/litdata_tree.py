"""The treespec of a LitData data set: what containers the leaves of a sample are in.

``read_tree`` turns the text of index.json into nested tuples of (kind, detail, children), None for a leaf. They pickle, hold no
closure, and are walked natively, one index after the other. Nothing is imported or called on the file's word.
"""

import builtins
import collections
import json

from . import _litdata_layout as native
from .litdata_errors import BadItem

PROTOCOL = 1
DEPTH = 300
# What may stand in a defaultdict as its factory.
FACTORIES = ("bool", "bytes", "dict", "float", "int", "list", "set", "str", "tuple")


def read_tree(text, types):
    """Read a treespec. ``types`` gives the class of a namedtuple by the name it was registered with.

    Raises BadItem for what is no treespec, UnknownType for containers whose class is not known.
    """
    try:
        protocol, node = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise BadItem(f"data_spec is {text!r:.60}, which is no treespec") from None
    if protocol != PROTOCOL:
        raise BadItem(f"data_spec has protocol {protocol!r:.20}; {PROTOCOL} is known")
    return read_node(node, types, DEPTH)


def read_node(node, types, depth):
    if not isinstance(node, dict) or not isinstance(node.get("children_spec"), list):
        raise BadItem(f"a node of data_spec is {node!r:.60}, which is none")
    if depth == 0:
        raise BadItem(f"data_spec nests deeper than {DEPTH}")
    name, context = node.get("type"), node.get("context")
    children = [read_node(child, types, depth - 1) for child in node["children_spec"]]
    if name is None:
        if children:
            raise BadItem("a leaf of data_spec has children")
        return None
    if name not in CONTAINERS:
        raise UnknownType(name)
    kind, detail = CONTAINERS[name](context, len(children), types)
    return kind, detail, children


class UnknownType(Exception):
    """A container is of a class that the data set names and that is not known; never leaves the package."""


def parse(context):
    try:
        return json.loads(context)
    except (ValueError, TypeError, RecursionError):
        raise BadItem(f"a context of data_spec is {context!r:.60}, which is not JSON") from None


def check_keys(keys, count):
    if not isinstance(keys, list) or len(keys) != count:
        raise BadItem(f"a dict of data_spec has {count} values for the keys {keys!r:.60}")
    if not all(isinstance(key, str | int | float | None) for key in keys):
        raise BadItem(f"a dict of data_spec has keys that cannot be keys: {keys!r:.60}")
    return tuple(keys)


def read_dict(context, count, types):
    return native.DICT, check_keys(parse(context), count)


def read_ordered(context, count, types):
    return native.MADE, Ordered(check_keys(parse(context), count))


def read_default(context, count, types):
    context = context if isinstance(context, dict) else parse(context)
    if not isinstance(context, dict):
        raise BadItem(f"the context of a defaultdict is {context!r:.60}, which is none")
    module, name = context.get("default_factory_module"), context.get("default_factory_name")
    if module != "builtins" or name not in FACTORIES:
        raise UnknownType(f"collections.defaultdict of {module}.{name}")
    keys = check_keys(context.get("dict_context"), count)
    return native.MADE, Default(keys, getattr(builtins, name))


def read_deque(context, count, types):
    maxlen = parse(context)
    if maxlen is not None and (type(maxlen) is not int or maxlen < 0):
        raise BadItem(f"a deque of data_spec has the length {maxlen!r:.60}")
    return native.MADE, Deque(maxlen)


def read_named(context, count, types):
    cls = types.get(context) if isinstance(context, str) else None
    if cls is None:
        raise UnknownType(f"collections.namedtuple registered as {context!r:.60}")
    return native.MADE, Named(cls)


CONTAINERS = {
    "builtins.dict": read_dict,
    "builtins.list": lambda context, count, types: (native.LIST, None),
    "builtins.tuple": lambda context, count, types: (native.TUPLE, None),
    "collections.OrderedDict": read_ordered,
    "collections.defaultdict": read_default,
    "collections.deque": read_deque,
    "collections.namedtuple": read_named,
}


# What makes the rarer containers of a list of values


class Ordered(collections.namedtuple("Ordered", "keys")):
    __slots__ = ()

    def __call__(self, values):
        return collections.OrderedDict(zip(self.keys, values, strict=True))


class Default(collections.namedtuple("Default", "keys factory")):
    __slots__ = ()

    def __call__(self, values):
        return collections.defaultdict(self.factory, zip(self.keys, values, strict=True))


class Deque(collections.namedtuple("Deque", "maxlen")):
    __slots__ = ()

    def __call__(self, values):
        return collections.deque(values, self.maxlen)


class Named(collections.namedtuple("Named", "cls")):
    __slots__ = ()

    def __call__(self, values):
        return self.cls(*values)


# How samples look when they are stacked


def count_leaves(tree):
    return 1 if tree is None else sum(map(count_leaves, tree[2]))


def batch_tree(tree, framework):
    """The containers of a batch, as ``collate`` leaves them, and whether text comes in a tuple, by leaf; None if it is to collate.

    torch makes lists of tuples, and hands the members of whatever is no dict on as tuples.
    """
    in_tuples = []

    def convert(node, in_tuple):
        if node is None:
            in_tuples.append(in_tuple)
            return None
        kind, detail, children = node
        if isinstance(detail, Deque) or (
            framework != "torch" and isinstance(detail, Default | Ordered)
        ):
            raise NotImplementedError
        of_dict = kind == native.DICT or isinstance(detail, Default | Ordered)
        in_tuple = framework == "torch" and not of_dict
        children = [convert(child, in_tuple) for child in children]
        if kind == native.TUPLE and framework == "torch":
            kind = native.LIST
        return kind, detail, children

    try:
        return native.compile_tree(convert(tree, False)), in_tuples
    except NotImplementedError:
        return None
