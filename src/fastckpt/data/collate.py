"""Many samples into one batch: every leaf stacked along a new first axis."""

from collections.abc import Mapping

import numpy as np

from ..importing import importing
from .tree import like


def collate(samples, framework="torch"):
    """Stack samples as torch's ``default_collate`` does, or (framework "numpy") with ``stack``.

    Raises ImportError where torch is wanted and not installed, else what those two raise.
    """
    return collator(framework)(samples)


def collator(framework):
    """The function that ``collate`` calls."""
    if framework != "torch":
        return stack
    try:
        with importing:
            from .torch_collate import collate as default_collate
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "batches are made of torch tensors, and torch is not installed; give collate_fn=, or a reader of framework='numpy'",
            name="torch",
        ) from None
    return default_collate


def stack(samples):
    """Stack samples into NumPy arrays, as a ``collate_fn`` that needs no torch: ``[n samples] -> batch``.

    Mappings, tuples and lists keep their form, text and bytes become lists. Raises ValueError where shapes or lengths differ,
    KeyError where a sample lacks a key.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (str, bytes)):
        return list(samples)
    if isinstance(first, (tuple, list)):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError("samples of different lengths cannot be stacked; give collate_fn=")
        return like(first, [stack(list(part)) for part in zip(*samples, strict=True)])
    return np.stack([np.asarray(sample) for sample in samples])
