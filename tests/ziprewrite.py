"""Change a file that torch.save wrote, record by record, and write it anew."""

import io
import zipfile

from zipcraft import Entry, archive


def records_of(data):
    """{name without its folder: bytes} of a ZIP file, in the order of the file."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {info.filename.partition("/")[2]: file.read(info) for info in file.infolist()}


def rewritten(data, **options):
    """The file again, with some records changed: ``change(name, content)`` gives new content, None leaves it out.

    The other options are those of every Entry, and change="" leaves the contents as they are.
    """
    change = options.pop("change", None) or (lambda name, content: content)
    found = {name: change(name, content) for name, content in records_of(data).items()}
    entries = [
        Entry(f"archive/{name}", content, **options)
        for name, content in found.items()
        if content is not None
    ]
    return archive(entries)


def with_damage(data, *records):
    """The file with a byte of some records flipped, and their checksums left as they were."""
    file = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        for info in opened.infolist():
            if info.file_size and info.filename.partition("/")[2] in records:
                start = info.header_offset
                name = int.from_bytes(data[start + 26 : start + 28], "little")
                extra = int.from_bytes(data[start + 28 : start + 30], "little")
                file[start + 30 + name + extra + info.file_size // 2] ^= 0x55
    return bytes(file)


def tagged(data, location):
    """A ZIP file whose storages are all tagged with another location than the CPU."""
    old, new = (
        b"X" + len(text).to_bytes(4, "little") + text for text in (b"cpu", location.encode())
    )
    return rewritten(
        data,
        change=lambda name, content: content.replace(old, new) if name == "data.pkl" else content,
    )


def big_endian(data, units):
    """A ZIP file as a big-endian machine writes it; ``units[key]`` is how many bytes of storage ``key`` swap together."""

    def change(name, content):
        if name == "byteorder":
            return b"big"
        folder, _, key = name.partition("/")
        return swapped(content, units[key]) if folder == "data" else content

    return rewritten(data, change=change)


def swapped(content, unit):
    return b"".join(content[i : i + unit][::-1] for i in range(0, len(content), unit))
