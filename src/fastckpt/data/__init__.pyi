from .checkpoint_reader import CheckpointReader as CheckpointReader
from .collate import stack as stack
from .dataset import Dataset as Dataset
from .litdata import LitDataReader as LitDataReader
from .litdata_codecs import fernet_key as fernet_key
from .loader import DataLoader as DataLoader
from .multi import MultiReader as MultiReader
from .reader import Reader as Reader
from .zarr_integrity import IntegrityReport as IntegrityReport
from .zarr_reader import ZarrReader as ZarrReader

__all__: list[str]
