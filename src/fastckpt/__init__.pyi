from . import data as data
from ._version import __version__ as __version__
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import open as open
from .errors import CheckpointError as CheckpointError
from .errors import ChecksumError as ChecksumError
from .errors import FormatError as FormatError
from .errors import LimitError as LimitError
from .errors import UnsafePickleError as UnsafePickleError
from .errors import UnsupportedError as UnsupportedError
from .findings import Finding as Finding
from .lazy import LazyTensor as LazyTensor
from .limits import Limits as Limits
from .loading import load as load
from .loading import load_into as load_into
from .nodes import Opaque as Opaque
from .salvage_report import SalvageReport as SalvageReport
from .salvaging import salvage as salvage
from .saving import save as save
from .scanning import ScanReport as ScanReport
from .scanning import scan as scan
from .sharded import ShardedCheckpoint as ShardedCheckpoint
from .sharding import save_sharded as save_sharded
from .verify_report import RecordCheck as RecordCheck
from .verify_report import VerifyReport as VerifyReport
from .verifying import verify as verify

__all__: list[str]
