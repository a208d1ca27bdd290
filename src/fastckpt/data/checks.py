"""What a loader refuses: arguments that contradict each other, in torch's terms."""

from ..arguments import at_least, kind_of

# Arguments of torch's DataLoader that are missing here, and what there is instead.
THREADS = "workers are threads, there are no processes to configure"
NOT_HERE = {
    "timeout": f"{THREADS}; a wait has no end of its own, Ctrl-C ends it",
    "prefetch_factor": "prefetch_depth= says how many batches in all are made ahead, not for each worker",
    "persistent_workers": f"{THREADS}; each epoch starts its own, which costs next to nothing",
    "worker_init_fn": f"{THREADS}; all share the dataset as it is",
    "multiprocessing_context": THREADS,
    "pin_memory_device": "Dataset(device=) says where batches go",
    "in_order": "batches always come in order",
}


def refuse_others(others):
    """Raise TypeError for arguments that a loader does not have; with a reason for those that torch's has."""
    for name in others:
        if name not in NOT_HERE:
            raise TypeError(f"DataLoader() got an unexpected keyword argument {name!r}")
        raise TypeError(f"{name}: DataLoader has no such argument of torch's: {NOT_HERE[name]}")


def check_samplers(
    dataset, batch_size, shuffle, sampler, batch_sampler, drop_last, seed, generator
):
    """Raise TypeError or ValueError where it cannot be told which samples are wanted, or in which order."""
    ordered = sampler is not None or batch_sampler is not None
    # Text has letters by number, and whoever gives one means a file.
    is_text = isinstance(dataset, (str, bytes, bytearray))
    has_samples = hasattr(dataset, "__getitem__") and (ordered or hasattr(dataset, "__len__"))
    if is_text or not has_samples:
        raise TypeError(
            f"dataset: a Reader, a Dataset or a map-style dataset (__getitem__ and __len__) is expected, not "
            f"{type(dataset).__name__}{'; CheckpointReader(path) reads a file' if is_text else ''}"
        )
    if batch_size is None:
        raise TypeError(
            "batch_size=None: a whole number is expected; batches are always made here, and iterating over the dataset gives samples"
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


NUMBERS = ("epoch", "start")
NUMBERS_OR_NONE = ("batches", "crc32", "seed", "sampler_epoch")


def check_state(state, loader):
    """What a loader is told to go on from, all of it looked at; ValueError for what is no state of a loader like this one."""
    keys = (*NUMBERS, *NUMBERS_OR_NONE, "generator")
    if not isinstance(state, dict):
        raise ValueError(
            f"state: what state_dict() of a loader gives is expected, not {kind_of(state)}"
        )
    if missing := [key for key in keys if key not in state]:
        raise ValueError(
            f"state: what state_dict() of a loader gives is expected; it has no {', '.join(missing)}"
        )
    try:
        checked = {key: at_least(0, key, state[key]) for key in NUMBERS}
        checked |= {
            key: state[key] if state[key] is None else at_least(0, key, state[key])
            for key in NUMBERS_OR_NONE
        }
    except TypeError as error:
        raise ValueError(f"state: {error}") from None
    if loader.shuffle and loader.generator is None and checked["seed"] is None:
        raise ValueError(
            "state: it has no seed, and this loader shuffles by one; it was taken of another kind of loader"
        )
    if loader.generator is not None and state["generator"] is None:
        raise ValueError(
            "state: it has none of a generator, and this loader shuffles by one; it was taken of another kind of loader"
        )
    return checked | {"generator": state["generator"]}
