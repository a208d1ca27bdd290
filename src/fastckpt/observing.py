"""What one pickle says, noted while the data-only machine executes it: names, calls, changes, and what is odd about them.

Everything is turned into text of bounded length at once: the objects of a hostile pickle are not kept, and what is shown of
them cannot be long.
"""

from ._spec import Global, StorageRef
from .errors import LimitError
from .nodes import Opaque
from .ratings import DANGEROUS, KNOWN, UNKNOWN, rate
from .torch_rows import from_type

NAME = 500  # characters of a module or a name that are kept
TEXT = 120  # of those that are shown in a sentence
MEMBER, MEMBERS, LEVELS = 40, 4, 3  # of one member, how many, how deep they nest
MOST_GIVEN_BACK = (
    32  # calls inside each other that give back what they are given; no torch.save writes two
)

NAMING = ("GLOBAL", "STACK_GLOBAL", "INST")
CHANGING = ("BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")
# What may be filled by SETITEMS, and by APPENDS: filling a tensor writes through its __setitem__.
MAPPINGS = ("OrderedDict", "Counter", "defaultdict", "dict")
SEQUENCES = ("deque", "list")


def shown(text, limit=TEXT):
    """Text of the file for a message: not long, and without characters that a terminal would obey."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return (
        text if text.isprintable() else text.encode("unicode_escape").decode("ascii")[: 4 * limit]
    )


def outline(value, levels=LEVELS):
    """A short repr of anything that a symbolic pickle holds, whatever it holds."""
    kind = type(value)
    if kind in (str, bytes, bytearray):
        text = repr(value[:MEMBER])
        return text if len(value) <= MEMBER else f"{text}... ({len(value)} in all)"
    if kind is int and value.bit_length() > 128:
        return f"<int of {value.bit_length()} bits>"
    if kind in (int, float, bool, type(None)):
        return repr(value)
    if kind is Global:
        return shown(value.qualname)
    if kind is StorageRef:
        return "<storage>"
    if kind is Opaque:
        return shown(value.qualname) + ("" if value.args is None else "(...)")
    if kind in (list, tuple, set, frozenset, dict):
        return _members(value, kind, levels)
    return f"<{kind.__name__}>"


def _members(value, kind, levels):
    if levels == 0:
        return f"<{kind.__name__} of {len(value)}>"
    parts = []
    for member in value:
        if len(parts) == MEMBERS:
            parts.append("...")
            break
        text = outline(member, levels - 1)
        parts.append(f"{text}: {outline(value[member], levels - 1)}" if kind is dict else text)
    inner = ", ".join(parts)
    if kind is tuple:
        return f"({inner},)" if len(parts) == 1 else f"({inner})"
    if kind is list:
        return f"[{inner}]"
    return f"{{{inner}}}" if kind is not frozenset else f"frozenset({{{inner}}})"


def looks_pickled(value):
    """Tell whether bytes, or text that stands for bytes, are a pickle of protocol 2 or later by both of their ends."""
    if type(value) is str:
        return value[:1] == "\x80" and value[1:2] <= "\5" and value[-1:] == "."
    return (
        type(value) in (bytes, bytearray)
        and value[:1] == b"\x80"
        and value[1:2] <= b"\5"
        and value[-1:] == b"."
    )


def is_usual_id(pid):
    """Tell whether a persistent id is one of those that torch.save has written."""
    if isinstance(pid, tuple) and pid:
        members = [(m,) if type(m) is not tuple else m for m in pid[:8]]
        plain = len(pid) < 8 and all(
            type(part) in (str, bytes, int, type(None)) for m in members[2:] for part in m
        )
        if pid[0] in ("storage", b"storage") and len(pid) in (5, 6):
            return plain and type(pid[1]) is Global and pid[1].storage_dtype >= 0
        if pid[0] in ("module", b"module") and len(pid) == 4:
            return plain and type(pid[1]) is Global
        return (
            len(pid) == 3 and type(pid[0]) is Global and plain
        )  # of tar files: a class and its source
    return type(pid) is int or type(pid) is str and pid.isdigit()


class Observation:
    """One pickle. ``names`` are (offset, opcode, module, name, rating, reason), ``calls`` (offset, opcode, what, detail, rating),
    ``oddities`` maps (rating, sentence) to (the first offset, how many times), ``nested`` are the offsets of calls that are given
    pickles as data. Offsets count from the start of the pickle, which lies at ``at`` in its source.

    ``left`` says how many names and questionable calls ("kept") and harmless calls ("known") may yet be listed.
    """

    def __init__(self, record, what, at, in_file, left):
        self.record, self.what, self.at, self.in_file, self.left = record, what, at, in_file, left
        self.nbytes = None  # up to and with STOP, where the pickle was executed up to there
        self.error = None
        self.telling = False  # whether it says more than data could by chance
        self.spent = dict.fromkeys(left, 0)
        self.names, self.calls, self.oddities, self.nested = [], [], {}, []
        self.counted = 0  # calls that are not listed
        self.rated, self.of_result = {}, {}

    def finish(self, unpickled):
        self.nbytes = unpickled.end

    def __call__(self, offset, opcode, subject, detail):
        if opcode in CHANGING:
            self.change(offset, opcode, subject, detail)
        elif opcode in ("PERSID", "BINPERSID"):
            if not is_usual_id(subject):
                self.odd(UNKNOWN, offset, f"a persistent id is {outline(subject)}")
        elif opcode in NAMING and type(subject) is Global:
            self.name(offset, opcode, subject)
        elif subject.callee is None:
            self.telling, computed = True, opcode == "STACK_GLOBAL"
            found = (
                "a name is made by calls, as it is run"
                if computed
                else f"{subject.qualname} is named"
            )
            self.odd(DANGEROUS if computed else UNKNOWN, offset, found)
        else:
            self.call(offset, opcode, subject)

    def spend(self, what):
        self.spent[what] += 1
        if self.left[what] < self.spent[what]:
            if what == "known":
                return False
            raise LimitError(
                "the file has more names and calls than a scan lists (Limits.scan_events raises the bound)"
            )
        return True

    def odd(self, rating, offset, sentence):
        self.spend("kept")
        first, count = self.oddities.get((rating, sentence), (offset, 0))
        self.oddities[rating, sentence] = first, count + 1

    def name(self, offset, opcode, found):
        self.telling = True
        self.spend("kept")
        key = found.module, found.name
        if key not in self.rated:
            rating, reason = rate(*key)
            self.rated[key] = shown(found.module, NAME), shown(found.name, NAME), rating, reason
            self.of_result[found.qualname] = rating
        self.names.append((offset, opcode, *self.rated[key]))

    def rating_of(self, callee):
        """Of what is called: a name's own, and of a call's result nothing better than unknown."""
        if type(callee) is Global:
            return self.rated[callee.module, callee.name][2]
        rating = self.of_result.get(callee.qualname.removesuffix("()"), UNKNOWN)
        return DANGEROUS if rating == DANGEROUS else UNKNOWN

    def call(self, offset, opcode, made):
        rating = self.rating_of(made.callee)
        if isinstance(made.args, tuple) and any(looks_pickled(arg) for arg in made.args[:MEMBERS]):
            self.spend("kept")
            self.nested.append(offset)
        if not self.spend("known" if rating == KNOWN else "kept"):
            self.counted += 1
            return
        arguments = outline(made.args) + (f" {outline(made.kwargs)}" if made.kwargs else "")
        self.calls.append((offset, opcode, shown(made.qualname), arguments, rating))
        if type(made.callee) is not Global:
            self.odd(rating, offset, f"what {shown(made.callee.qualname)} gives is called")
        elif (
            made.callee.known is not None
            and made.callee.known.call is from_type  # which gives a state to what it makes
            and (target := given_back(made)) is not made
        ):
            self.change(offset, opcode, target, made.args)

    def change(self, offset, opcode, target, values):
        """A state, items or pairs that something gets which is neither a list, a dict nor a set of the pickle's own."""
        target = given_back(target)
        if type(target) is Opaque and target.callee is not None:
            rating = self.rating_of(target.callee)
            if rating != KNOWN:
                self.spend("kept")
                self.calls.append((offset, opcode, shown(target.qualname), outline(values), rating))
            elif opcode != "BUILD" and not fills(opcode, target):
                self.odd(
                    UNKNOWN,
                    offset,
                    f"{opcode} fills what {shown(target.qualname)} made, which is no container",
                )
        elif target is UNTOLD:
            self.odd(UNKNOWN, offset, f"{opcode} changes what cannot be told: {outline(values)}")
        elif opcode != "BUILD" or values or type(target) is Global:
            rating = DANGEROUS if type(target) is Global else UNKNOWN
            self.odd(
                rating, offset, f"{opcode} changes {outline(target)} itself: {outline(values)}"
            )


UNTOLD = object()


def given_back(made):
    """What a value is that a known function gives back, of its own arguments or those of what it calls; any other as it is.

    UNTOLD where that is something, and the pickle does not say plainly what.
    """
    if type(made) is not Opaque:
        return made
    function, args = made.callee, made.args
    for _ in range(MOST_GIVEN_BACK):
        if type(function) is not Global or function.known is None:
            return made
        if function.known.call is from_type:
            if type(args) is not tuple or len(args) < 3 or type(args[0]) is not Global:
                return UNTOLD
            function, args = args[0], args[2]
            continue
        if function.known.gives_back is None:
            return made
        if type(args) is not tuple or len(args) <= function.known.gives_back:
            return UNTOLD
        made = args[function.known.gives_back]
        if type(made) is not Opaque:
            return made
        function, args = made.callee, made.args
    return UNTOLD


def fills(opcode, target):
    """Tell whether an opcode fills a container of a known class."""
    callee = target.callee
    if type(callee) is Global and callee.name in (
        "_reconstructor",
        "__newobj__",
    ):  # the class is the first argument
        callee = target.args[0] if isinstance(target.args, tuple) and target.args else None
    wanted = MAPPINGS if opcode.startswith("SETITEM") else SEQUENCES
    return type(callee) is Global and callee.known is not None and callee.name in wanted


class Observer:
    """What a PickleWalk shows its pickles to: ``observations``, and what was found beside them.

    ``damaged`` are (record, error or sentence, whether its offset is one of the file), ``behind`` are (record, offset or
    None, how many bytes follow there that belong to nothing).
    """

    def __init__(self, limits):
        self.left = {"kept": limits.scan_events, "known": limits.scan_events}
        self.observations, self.damaged, self.behind = [], [], []

    def begin(self, record, what, at, in_file):
        """A pickle is about to be executed. One that did not come to an end, without an error, is tried once more."""
        current = self.last()
        if current is not None and current.nbytes is None and current.error is None:
            self.forget()
        elif current is not None:
            for kind, count in current.spent.items():
                self.left[kind] -= count
            current.spent.clear()
        self.observations.append(Observation(record, what, at, in_file, self.left))
        return self.observations[-1]

    def last(self):
        return self.observations[-1] if self.observations else None

    def forget(self):
        """What was begun last is no pickle."""
        self.observations.pop()

    def damage(self, error, record, in_file):
        """Note what stood in the way: of the pickle begun last, or of the file."""
        current = self.last()
        if current is not None and current.nbytes is None and current.error is None:
            current.error = error
        else:
            self.damaged.append((record, error, in_file))

    def trailing(self, record, offset, nbytes):
        self.behind.append((record, offset, nbytes))
