from .reader import Reader as Reader
from .zarr_integrity import IntegrityReport as IntegrityReport
from .zarr_reader import ZarrReader as ZarrReader

__all__: list[str]
