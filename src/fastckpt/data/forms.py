"""The form of a sample: its fields, their types, dtypes and numbers of axes. Samples of one data set have one."""

from collections.abc import Mapping

from .tree import is_texts


def form_of(value):
    """What the form of another sample is compared with; sizes are not part of it, nor is what a list holds."""
    if isinstance(value, Mapping):
        return {key: form_of(part) for key, part in value.items()}
    if isinstance(value, tuple) and not is_texts(value):  # of a batch, there are as many as samples
        return tuple([form_of(part) for part in value])
    dtype = getattr(value, "dtype", None)
    return (
        type(value) if dtype is None else (type(value).__name__, dtype, getattr(value, "ndim", 0))
    )


def difference(expected, found, path=""):
    """A sentence on how a form differs from what is expected, None where it does not."""
    if expected == found:
        return None
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            lacks = [key for key in expected if key not in found]
            more = [key for key in found if key not in expected]
            words = [f"lacks {names(lacks)}"] * bool(lacks) + [f"has {names(more)}"] * bool(more)
            return f"{path or 'it'} {' and '.join(words)}"
        pairs = [(f"{path}[{key!r}]", expected[key], found[key]) for key in expected]
    elif is_parts(expected) and is_parts(found) and len(expected) == len(found):
        pairs = [
            (f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected, found, strict=True))
        ]
    else:
        return f"{path or 'it'} is {words_of(found)} instead of {words_of(expected)}"
    return next(said for pair in pairs if (said := difference(pair[1], pair[2], pair[0])))


def is_parts(form):
    """Whether a form is that of a tuple; that of an array is a tuple that begins with text."""
    return isinstance(form, tuple) and not (form and isinstance(form[0], str))


def names(keys):
    return ", ".join(map(repr, keys))


def words_of(form):
    if isinstance(form, dict):
        return "a mapping"
    if is_parts(form):
        return f"a tuple of {len(form)}"
    if isinstance(form, tuple):
        return f"{form[0]} of {form[1]} with {form[2]} axes"
    return form.__name__
