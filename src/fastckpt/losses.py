"""What of a symbolic object cannot be made without some of its storages.

A call needs all of its arguments. Containers that are no argument lose what is lost in them and stay: the nesting of a
checkpoint, its step counts and its other tensors outlive a tensor.
"""

from ._spec import StorageRef
from .nodes import MISSING, Opaque

# Calls of torch's of which one argument is the attributes of what they make; it does without those that are lost.
ATTRIBUTES_AT = {
    "torch._utils._rebuild_parameter_with_state": 3,
    "torch._tensor._rebuild_from_type_v2": 3,
    "torch._tensor._rebuild_from_type": 3,
    "torch.tensor._rebuild_from_type": 3,
}
PLAIN = (list, tuple, dict, set, frozenset)
PARTS = (Opaque, StorageRef, *PLAIN)
# How a part needs a member: with all that is in it, the member itself, or not at all, where it only holds it; a part that would be
# spared does without.
NEEDED_WHOLE, NEEDED, INSIDE, SPARED = range(4)


def lost_parts(root, is_lost):
    """The ids of the parts of an object that cannot be made; ``is_lost`` tells it of a storage (a StorageSpec).

    They are storages and calls, never plain containers, and hold for as long as ``root`` is alive. OrderedDicts of Python 2,
    which got their entries as one argument, are changed to what they are in Python 3, in place.
    """
    # For each way to need: id of a member -> that of the part that needs it, or a list of them. Hundreds of thousands of tuples
    # in place of the numbers would keep the garbage collector busy for longer than all the rest takes.
    needs, lost = [{}, {}, {}], []
    todo, seen = [root], set()
    while todo:
        value = todo.pop()
        identity = id(value)
        if identity in seen:
            continue
        seen.add(identity)
        if isinstance(value, StorageRef):
            if is_lost(value.storage):
                lost.append(identity)
        elif isinstance(value, (Opaque, *PLAIN)):
            for member, need in members_of(value):
                # The tuple without members is one for all.
                if isinstance(member, PARTS) and member != ():
                    todo.append(member)
                    if need != SPARED:
                        note(needs[need], id(member), identity)
    return closure(lost, *needs)


def note(holders, member, holder):
    """Add to the holders of a member."""
    before = holders.setdefault(member, holder)
    if isinstance(before, list):
        before.append(holder)
    elif before != holder:
        holders[member] = [before, holder]


def closure(found, whole, itself, inside):
    """All that follows from what is lost: ids. What holds it is incomplete, and lost where it is needed whole."""
    lost, incomplete = set(), set()
    todo = [(part, True) for part in found]
    while todo:
        part, is_lost = todo.pop()
        if is_lost and part not in lost:
            lost.add(part)
            todo += [(holder, True) for holder in holders_of(itself, part)]
        if part not in incomplete:
            incomplete.add(part)
            todo += [(holder, True) for holder in holders_of(whole, part)]
            todo += [(holder, False) for holder in holders_of(inside, part)]
    return lost


def holders_of(holders, member):
    found = holders.get(member, ())
    return (found,) if isinstance(found, int) else found


def members_of(value):
    """(member, how it is needed) of a part."""
    if isinstance(value, dict):
        return [(member, INSIDE) for pair in value.items() for member in pair]
    if not isinstance(value, Opaque):
        return [(member, INSIDE) for member in value]
    spread_pairs(value)
    spared_at = ATTRIBUTES_AT.get(value.qualname, -1)
    args = value.args if isinstance(value.args, tuple) else (value.args,)
    found = [(arg, NEEDED if at == spared_at else NEEDED_WHOLE) for at, arg in enumerate(args)]
    # The tuple itself is written, too.
    found += [(value.callee, NEEDED), (value.kwargs, NEEDED_WHOLE)]
    found += state_of(value.state)
    found += [(member, SPARED) for member in value.items]
    found += [(member, SPARED) for pair in value.pairs.items() for member in pair]
    for opcode, values in value.later:
        found += state_of(values) if opcode == "BUILD" else [(member, SPARED) for member in values]
    return found


def state_of(state):
    """The members that a state makes: attributes by name may be lost, whatever else a class wants it wants whole."""
    if state is MISSING:
        return []
    if isinstance(state, dict):
        return [(state, SPARED)]
    by_slots = isinstance(state, tuple) and len(state) == 2
    if by_slots and all(part is None or isinstance(part, dict) for part in state):
        return [(part, SPARED) for part in state]
    return [(state, NEEDED_WHOLE)]


def spread_pairs(node):
    """OrderedDict([[key, value], ...]) of Python 2 as an OrderedDict() whose entries are set one by one."""
    if node.qualname != "collections.OrderedDict" or not isinstance(node.args, tuple):
        return
    pairs = node.args[0] if len(node.args) == 1 else None
    if not isinstance(pairs, list) or node.pairs or node.later:
        return
    if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        try:
            node.pairs = dict(pairs)
        except TypeError:  # a key that cannot be hashed; then nobody can read it
            return
        node.args = ()
