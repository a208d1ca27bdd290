from . import stream as stream
from ._version import __version__ as __version__
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import open as open
from .errors import CheckpointError as CheckpointError
from .errors import ChecksumError as ChecksumError
from .errors import FormatError as FormatError
from .errors import LimitError as LimitError
from .errors import UnsafePickleError as UnsafePickleError
from .errors import UnsupportedError as UnsupportedError
from .lazy import LazyTensor as LazyTensor
from .limits import Limits as Limits
from .loading import load as load
from .loading import load_into as load_into
from .nodes import Opaque as Opaque
from .saving import save as save

__all__: list[str]
