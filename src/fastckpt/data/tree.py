"""Samples and batches as trees: mappings, tuples and lists with leaves that are stacked, joined, cut or moved."""

from collections.abc import Mapping

import numpy as np

from ..importing import importing


def map_leaves(change, value):
    """The tree with ``change(leaf)`` in place of each leaf; mappings become dicts, tuples and lists keep their type."""
    if isinstance(value, Mapping):
        return {key: map_leaves(change, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return like(value, [map_leaves(change, part) for part in value])
    return change(value)


def like(first, parts):
    """Parts in a tuple, named tuple or list as ``first`` is one."""
    if hasattr(first, "_fields"):
        return type(first)(*parts)
    return tuple(parts) if isinstance(first, tuple) else parts


def is_texts(value):
    """Whether a part of a batch is a leaf that could not be stacked: text or bytes, in a list (of torch's, or a tuple)."""
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], (str, bytes))


def odd_rows(batch, count):
    """(path, number of rows) of the first leaf of a stacked batch that has other than ``count`` rows; None where none has.

    What is no tensor, array or list of texts, or has no axes, has no number of rows that could be told.
    """
    try:
        shape = getattr(batch, "shape", None)
    except RuntimeError:  # torch's nested tensors
        return None
    if isinstance(shape, tuple):
        return ("", shape[0]) if shape and shape[0] != count else None
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif is_texts(batch):
        return ("", len(batch)) if len(batch) != count else None
    elif isinstance(batch, (tuple, list)):
        parts = enumerate(batch)
    else:
        return None
    for key, part in parts:
        if found := odd_rows(part, count):
            return f"[{key!r}]{found[0]}", found[1]
    return None


def cut(batch, start, end):
    """Samples ``start`` to ``end`` (exclusive) of a stacked batch: views, no copies."""
    if isinstance(batch, Mapping):
        return {key: cut(part, start, end) for key, part in batch.items()}
    if isinstance(batch, (tuple, list)) and not is_texts(batch):
        return like(batch, [cut(part, start, end) for part in batch])
    return batch[start:end]


def merge(batches, order):
    """Stacked batches, one behind the other, with their samples in another order (``order[k]``: which one comes k-th)."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {key: merge([batch[key] for batch in batches], order) for key in first}
    if is_texts(first):
        joined = [text for batch in batches for text in batch]
        return [joined[i] for i in order.tolist()]
    if isinstance(first, (tuple, list)):
        return like(first, [merge(list(parts), order) for parts in zip(*batches, strict=True)])
    if hasattr(first, "new_empty"):  # a torch tensor
        with importing:
            import torch

        return torch.cat(batches)[torch.from_numpy(order)]
    return np.concatenate(batches)[order]
