"""Errors about names that are not there: what was asked for, and what there is that may have been meant."""

import difflib
import itertools

LOOK = 1000  # names that are compared letter by letter
MOST, LONGEST = 3, 200  # names that are shown, characters of each


def not_found(asked, names, *, pattern=False):
    """The KeyError for names, or a glob pattern, that nothing has; ``names`` are those that there are."""
    first = asked if pattern else asked[0]
    inside = next((name for name in names if name.startswith(f"{first}.")), None)
    if inside is not None:
        first = f"{first:.{LONGEST}}"
        return KeyError(
            f"{first!r} is a container, of {inside!r:.{LONGEST}} for example; use '{first}.*'"
        )
    if pattern:
        what = f"no name in the checkpoint matches keys={asked!r:.{LONGEST}}"
        return KeyError(f"{what}{suggestion(asked, names)}")
    shown = ", ".join([f"{name:.{LONGEST}}" for name in asked[:10]])
    more = " ..." if len(asked) > 10 else ""
    return KeyError(f"not in the checkpoint: {shown}{more}{suggestion(asked[0], names)}")


def suggestion(asked, names):
    """A part of a sentence: the names that are near, else some of those that there are."""
    names = list(names)
    found = near(asked, names)
    if found:
        return f"; near it: {in_a_row(found)}"
    if not names:
        return "; there are no names"
    more = f", ... ({len(names)} in all)" if len(names) > MOST else ""
    return f"; there are: {in_a_row(names[:MOST])}{more}"


def in_a_row(names):
    return ", ".join([f"{name:.{LONGEST}}" for name in names])


def near(asked, names):
    """Up to three names that end like it, as where a prefix was left out, or that are spelled much alike, or begin or end so."""
    bare = asked.strip("*.?")[:LONGEST]
    if not bare:
        return []
    inside = (name for name in names if f".{bare}." in f".{name}.")
    found = list(itertools.islice(inside, MOST))
    if not found:
        some = [name for name in names[:LOOK] if len(name) <= LONGEST]
        found = difflib.get_close_matches(bare, some, MOST)
        if not found:
            pieces = first_of_pieces(some, 1 + bare.count("."))
            found = [pieces[piece] for piece in difflib.get_close_matches(bare, pieces, MOST)]
    return list(dict.fromkeys(found))


def first_of_pieces(names, count):
    """{so many keys that a name begins or ends with: the first such name}."""
    found = {}
    for name in names:
        keys = name.split(".")
        for piece in (keys[:count], keys[-count:]):
            found.setdefault(".".join(piece), name)
    return found
