"""What arguments of callers are, in the words of messages, and whether they are what is expected."""

import operator


def at_least(least, name, value):
    """A whole number that is no less than ``least``; TypeError or ValueError, in which ``name`` is the argument's."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}={value!r:.100}: a whole number is expected")
    if number < least:
        raise ValueError(f"{name}={number}: at least {least} is needed")
    return number


def kind_of(value):
    """The name of a value's type, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
