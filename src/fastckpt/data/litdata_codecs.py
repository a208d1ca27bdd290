"""What unseals LitData chunks and items: zstd and Fernet, each by a library that is optional, and the key of the latter.

``Zstd`` and ``Fernet`` are called with bytes, from any thread, and raise BadItem for what they cannot unseal.
"""

import base64
import hashlib
import json

from ..importing import importing
from ..source import open_source
from .extras import missing
from .litdata_errors import BadItem

# zstd's longest run of one byte is a block of 128 KiB, which takes 4 bytes.
MOST_INFLATION = 1 << 15
ITERATIONS, KEY_NBYTES = 480_000, 32


class Zstd:
    def __init__(self):
        try:
            with importing:
                import zstandard
        except ModuleNotFoundError as error:
            raise missing(error, "zstandard", "the data set is compressed with zstd") from None
        self.zstd = zstandard
        self._idle = []  # one decompressor serves one thread at a time; taking from a list is atomic

    def __call__(self, data, sizes=()):
        """Inflate one frame, to one of ``sizes`` where these are known; never to more than zstd can make of as many bytes."""
        most = min(MOST_INFLATION * len(data), (1 << 32) - 1)
        if sizes and min(sizes) > most:
            raise BadItem(
                f"{min(sizes)} bytes are said to be in {len(data)} bytes of zstd, which hold {most} at most"
            )
        try:
            inflated = self._inflate(data, min(most, max(sizes, default=most)))
        except self.zstd.ZstdError as error:
            raise BadItem(f"its zstd data cannot be inflated ({error})") from None
        if sizes and len(inflated) not in sizes:
            raise BadItem(f"its zstd data holds {len(inflated)} bytes instead of {sizes[0]}")
        return inflated

    def _inflate(self, data, most):
        said = self.zstd.frame_content_size(data)
        if said > most:
            raise self.zstd.ZstdError(
                f"it says that it holds {said} bytes, {most} at most are expected"
            )
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = self.zstd.ZstdDecompressor()
        if said >= 0:
            inflated = idle.decompress(data, max_output_size=most, allow_extra_data=False)
        else:  # it does not say: grow with what comes, and look no further than the bound
            with idle.stream_reader(data) as stream:
                inflated = stream.read(most + 1)
            if len(inflated) > most:
                raise self.zstd.ZstdError(f"it holds more than the {most} bytes that are expected")
        self._idle.append(idle)
        return inflated


class Fernet:
    def __init__(self, key):
        try:
            with importing:
                from cryptography import fernet
        except ModuleNotFoundError as error:
            raise missing(error, "cryptography", "the data set is encrypted") from None
        self._fernet, self._invalid = fernet.Fernet(key), fernet.InvalidToken

    def __call__(self, data):
        try:
            return self._fernet.decrypt(bytes(data))
        except self._invalid:
            raise BadItem(
                "it cannot be decrypted: the key is another one, or the bytes are damaged"
            ) from None


def fernet_key(key_file, password):
    """Derive the key of an encrypted LitData data set from its password.

    ``key_file`` is what LitData's ``FernetEncryption.save`` wrote (path or binary file object): the salt is only there, not in the
    data set. Returns the key as LitDataReader takes it. Raises ValueError for a file that holds no salt.

        LitDataReader("train/", key=fernet_key("key.json", "correct horse"))
    """
    source = open_source(key_file)
    try:
        salt = base64.urlsafe_b64decode(json.loads(bytes(source.read(0, source.nbytes)))["salt"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{source.name}: no salt is in it; a file that FernetEncryption.save() wrote is needed"
        ) from None
    finally:
        source.close()
    key = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, ITERATIONS, KEY_NBYTES)
    return base64.urlsafe_b64encode(key)
