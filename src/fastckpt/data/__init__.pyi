from .litdata import LitDataReader as LitDataReader
from .litdata_codecs import fernet_key as fernet_key
from .reader import Reader as Reader

__all__: list[str]
