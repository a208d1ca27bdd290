"""Many samples into one batch: every leaf stacked along a new first axis."""

from collections.abc import Mapping

import numpy as np


def collate(samples, framework="torch"):
    """Stack samples as torch's ``default_collate`` does, or (framework "numpy") into arrays in the same way.

    Mappings, tuples and lists keep their form, text and bytes become lists. Raises ValueError or RuntimeError where shapes
    differ, KeyError where a sample lacks a key, ImportError where torch is wanted and not installed.
    """
    return torch_collate(samples) if framework == "torch" else stack(samples)


def torch_collate(samples):
    try:
        from torch.utils.data import default_collate
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "batches are made of torch tensors, and torch is not installed; give collate_fn=, or a reader of framework='numpy'",
            name="torch",
        ) from None
    return default_collate(samples)


def stack(samples):
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (str, bytes)):
        return list(samples)
    if isinstance(first, (tuple, list)):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError("samples of different lengths cannot be stacked; give collate_fn=")
        parts = [stack(list(part)) for part in zip(*samples, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*parts)
        return tuple(parts) if isinstance(first, tuple) else parts
    return np.stack([np.asarray(sample) for sample in samples])
