"""progress=: tell people, or a program, how far a long read is."""

import contextlib

from .importing import importing


def check(progress):
    """Raise TypeError for what can't be told anything."""
    if progress not in (None, True, False) and not callable(progress):
        raise TypeError(
            f"progress={progress!r}: True for a bar, or a callable(bytes done, bytes in all, name) is expected"
        )


@contextlib.contextmanager
def reporting(progress, name):
    """A callable(bytes done, bytes in all) for the readers below, or None where nobody wants to know.

    ``progress`` is what the caller gave: None or False, a callable(bytes done, bytes in all, name), or True for a bar of
    tqdm's, which suits a terminal as well as a notebook. Raises ModuleNotFoundError for True where tqdm is not installed.
    """
    if not progress:
        yield None
    elif progress is not True:
        yield lambda done, total: progress(done, total, name)
    else:
        with _bar(name) as bar:

            def tell(done, total):
                bar.total = total
                bar.update(done - bar.n)

            yield tell


class Phases:
    """Several works, one after the other, told as one; ``tell`` may be None."""

    def __init__(self, tell):
        self.tell, self.before, self.total = tell, 0, 0

    def next(self, then=0):
        """A callable(bytes done, bytes in all) for the work that begins now, behind which about ``then`` bytes follow; or None."""
        if self.tell is None:
            return None
        self.before += self.total
        self.total = 0

        def tell(done, total):
            self.total = total
            self.tell(self.before + done, self.before + total + then)

        return tell


def _bar(name):
    try:
        with importing:
            from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "progress=True needs tqdm (pip install tqdm, or this package's extra 'progress'); a callable(bytes done, bytes in all, name) needs nothing",
            name=error.name,
        ) from None
    return tqdm(desc=name, unit="B", unit_scale=True, unit_divisor=1024)
