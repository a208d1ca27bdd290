"""What a loader refuses: arguments that contradict each other, in torch's terms."""

import operator


def at_least(least, name, value):
    """A whole number that is no less than ``least``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name}={value!r}: a whole number is expected")
    if number < least:
        raise ValueError(f"{name}={number}: at least {least} is needed")
    return number


def check_samplers(
    dataset, batch_size, shuffle, sampler, batch_sampler, drop_last, seed, generator
):
    """Raise TypeError or ValueError where it cannot be told which samples are wanted, or in which order."""
    ordered = sampler is not None or batch_sampler is not None
    if not hasattr(dataset, "__getitem__") or not (ordered or hasattr(dataset, "__len__")):
        raise TypeError(
            f"dataset: a Reader, a Dataset or a map-style dataset (__getitem__ and __len__) is expected, not "
            f"{type(dataset).__name__}"
        )
    if batch_sampler is not None and (
        batch_size != 1 or shuffle or sampler is not None or drop_last
    ):
        raise ValueError(
            "batch_sampler decides all: batch_size, shuffle, sampler and drop_last exclude it"
        )
    if sampler is not None and shuffle:
        raise ValueError("sampler and shuffle exclude each other: the sampler decides the order")
    if seed is not None and generator is not None:
        raise ValueError("seed and generator exclude each other")
