from .reader import Reader as Reader

__all__: list[str]
