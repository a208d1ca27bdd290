"""Other checkpoints in a file than the one of it that is salvaged: where the first of them begins."""

import bisect

from .containers import sniff
from .containers._zip_end import CUT_IT
from .containers._zip_names import PICKLE
from .containers.zip_walk import Walker
from .findings import Finding
from .salvage_report import SECOND_ARCHIVE


def second_archive(source, at, taken):
    """The finding that another checkpoint begins at byte ``at`` than that whose pickle is at byte ``taken``."""
    problem = f"another checkpoint begins at byte {at}, and nothing of it is kept"
    kept = f"what is kept is of that whose pickle is at byte {taken}"
    return Finding(SECOND_ARCHIVE, f"{source.name}: {problem}: {kept}; {CUT_IT}", None, at)


def checkpoint_behind(source, end):
    """Where a ZIP or a legacy stream begins behind one that ends at byte ``end``: there, or nowhere (None)."""
    head = bytes(source.read(end, max(0, min(sniff.HEAD_NBYTES, source.nbytes - end))))
    return end if sniff.is_archive(head) or sniff.first_integer(head) == sniff.MAGIC else None


def second_pickle(source, claims):
    """The first local header of a data.pkl that lies in none of the records of ``claims``, nor is that of one; None without."""
    spans = sorted((claim.offset, claim.offset + claim.stored) for claim in claims)
    ends, walker = dict(spans), Walker(source)
    header = walker.next_header(0)
    while header is not None:
        row = bisect.bisect(spans, (header.at, source.nbytes)) - 1
        if row >= 0 and header.at < spans[row][1]:
            header = walker.next_header(spans[row][1])
            continue
        if f"/{header.name}".endswith(f"/{PICKLE}") and header.data not in ends:
            return header.at
        header = walker.next_header(ends.get(header.data, header.data))
    return None
