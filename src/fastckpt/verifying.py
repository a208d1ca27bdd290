"""verify: read a whole checkpoint, compare all that can be compared, and say everything that is wrong with it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from .checking import NoCheckpoint
from .containers import sniff
from .containers.legacy import LegacyContainer
from .containers.tar import TarContainer
from .errors import FormatError
from .importing import importing
from .loading import check_types
from .shard_index import check_region, is_index, weights_of
from .source import open_source
from .stream_check import StreamCheck
from .verify_report import (
    VerifyReport,
)
from .workers import check_threads
from .zip_check import ZipCheck

if TYPE_CHECKING:
    from ._annotations import CheckpointFile, Progress
    from .limits import Limits
    from .sharded_reports import ShardedReport


def verify(
    f: CheckpointFile,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    limits: Limits | None = None,
    offset: int = 0,
    nbytes: int | None = None,
) -> VerifyReport | ShardedReport:
    """Read a whole checkpoint, compare all that can be compared, and report everything that is wrong with it.

    The arguments are those of ``load``. Nothing is loaded and torch is not needed; one bad thing hides no other. A folder of
    shards, or their index, gives a ShardedReport: shard by shard.
    What is no checkpoint, or was cut off before its directory, gives a report that says so (``ok`` is False). Raises OSError,
    and TypeError and ValueError for arguments that cannot be honoured.
    """
    check_types(progress, limits)
    check_threads(threads)
    f = weights_of(f)
    if is_index(f):
        with importing:
            from .sharded_reports import report_on_shards

        check_region(f, offset, nbytes)
        report_on = functools.partial(
            verify_source, threads=threads, progress=progress, limits=limits
        )
        return report_on_shards(f, report_on, compare=True)
    source = open_source(f, offset, nbytes)
    try:
        return verify_source(source, threads=threads, progress=progress, limits=limits)
    finally:
        source.close()


def verify_source(source, **options):
    """The report on an open source; the options are those of ``verify``."""
    with source.in_use():
        try:
            kind = sniff.kind(source)
        except FormatError as error:
            return NoCheckpoint(source, **options).report(error)
        if kind == "zip":
            return ZipCheck(source, **options).report()
        return StreamCheck(
            source, LegacyContainer if kind == "legacy" else TarContainer, **options
        ).report()
