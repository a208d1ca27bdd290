"""Make the pages that ``asv publish`` wrote work without a network.

They fetch their libraries from public servers. This takes the same libraries from npm (``npm pack``, nothing in
them is run), puts them beside the pages and rewrites the references. It fails when a reference is left that it
does not know, as after an update of asv.
"""

import argparse
import base64
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Address in the page -> npm package, file in it, its SHA-256. Where npm has only the readable form of what the page
# takes minified, it is that.
LIBRARIES = {
    "https://code.jquery.com/jquery-3.3.1.min.js": (
        "jquery@3.3.1",
        "dist/jquery.min.js",
        "160a426ff2894252cd7cebbdd6d6b7da8fcd319c65b70468f10b6690c45d02ef",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/flot/0.8.3/jquery.flot.min.js": (
        "flot@0.8.3",
        "jquery.flot.js",
        "b7b931f273c38b1277b9c6c1f4e05c4ec09885a487bddaf3279e2d7e49a38e12",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/flot/0.8.3/jquery.flot.time.min.js": (
        "flot@0.8.3",
        "jquery.flot.time.js",
        "a582c832adc7138a6b05aaf61f16ebac274701f1be4afea77e739a1c34b9c41a",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/flot/0.8.3/jquery.flot.selection.min.js": (
        "flot@0.8.3",
        "jquery.flot.selection.js",
        "e6c85f6c1ebe4b4da29d8ae238c7c5060283f05f7ef054f6b91817d02c092918",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/flot/0.8.3/jquery.flot.categories.min.js": (
        "flot@0.8.3",
        "jquery.flot.categories.js",
        "6e81664b28ea795c734906f4aa15614640a75ac7fbd399a7fb9084040698351a",
    ),
    "https://cdn.jsdelivr.net/npm/flot-orderbars@1.0.0/js/jquery.flot.orderBars.js": (
        "flot-orderbars@1.0.0",
        "js/jquery.flot.orderBars.js",
        "39735b4f46f96ff4e082572401f47c55a2767b366fd1d1e821e44a8d830a12bf",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/stupidtable/1.0.1/stupidtable.min.js": (
        "stupid-table-plugin@1.1.3",
        "stupidtable.min.js",
        "4642380f28ebe9ed7cac251793b281ef8620c4386205d92788f9b12f5cceb4e0",
    ),
    "https://cdnjs.cloudflare.com/ajax/libs/blueimp-md5/2.19.0/js/md5.min.js": (
        "blueimp-md5@2.19.0",
        "js/md5.min.js",
        "64d7ded388c562e4bde9e58ce205e5fa01b9734fcd434d496eb7b4fbfe9b927d",
    ),
    "https://cdn.jsdelivr.net/npm/bootstrap@3.1.1/dist/js/bootstrap.min.js": (
        "bootstrap@3.1.1",
        "dist/js/bootstrap.min.js",
        "898d05a17f2cfc5120ddcdba47a885c378c0b466f30f0700e502757e24b403a1",
    ),
    "https://cdn.jsdelivr.net/npm/bootstrap@3.1.1/dist/css/bootstrap.min.css": (
        "bootstrap@3.1.1",
        "dist/css/bootstrap.min.css",
        "e9503448692b738dd260fbd7f7cabf2e11f09b600fa97e6eb3a56eba5b1a7e9b",
    ),
}
# An element that makes the browser fetch something, and what a style sheet fetches.
REFERENCE = re.compile(
    r"""<(script|link)\b[^>]*?\b(?:src|href)=["']((?:https?:)?//[^"']+)["'][^>]*>"""
)
STYLE = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')]+)""")


def fetch(package, folder):
    """The files of an npm package: {path in it: bytes}."""
    command = ["npm", "pack", "--silent", "--ignore-scripts", package]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    with tarfile.open(
        fileobj=io.BytesIO(Path(folder, done.stdout.split()[-1]).read_bytes())
    ) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }


def add_libraries(html, folder):
    """Write all libraries into ``html``/libraries; {address in the page: its new name}."""
    packages = {
        package: fetch(package, folder) for package in {entry[0] for entry in LIBRARIES.values()}
    }
    target = html / "libraries"
    target.mkdir(exist_ok=True)
    names = {}
    for address, (package, path, expected) in LIBRARIES.items():
        data = packages[package][path]
        found = hashlib.sha256(data).digest()
        if found.hex() != expected:
            sys.exit(
                f"{package}: {path} has SHA-256 {found.hex()}, expected {expected}; the library is not the one known"
            )
        name = path.rpartition("/")[2]
        (target / name).write_bytes(data)
        names[address] = f"libraries/{name}", base64.b64encode(found).decode()
    return names


def rewrite(page, names):
    """Turn the references of one page to the libraries into local ones."""

    def local(match):
        element, address = match[1], match[2]
        if address not in names:
            sys.exit(f"{page}: refers to {address}, which is not known; add it to LIBRARIES")
        name, digest = names[address]
        if element == "link":
            return f'<link rel="stylesheet" href="{name}" integrity="sha256-{digest}">'
        return f'<script src="{name}" integrity="sha256-{digest}" onerror="js_load_failure()">'

    page.write_text(REFERENCE.sub(local, page.read_text()))


def left(html):
    """References to other servers that a browser would follow by itself."""
    for path in sorted(html.rglob("*")):
        if path.suffix in (".html", ".js", ".css"):
            text = path.read_text(errors="replace")
            found = [match[2] for match in REFERENCE.finditer(text)] + STYLE.findall(text)
            yield from (f"{path}: {address}" for address in found)


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("html", type=Path, help="the folder that asv publish wrote")
    html = parser.parse_args().html
    if not shutil.which("npm"):
        sys.exit("npm is needed: it fetches the libraries that the pages use")
    with tempfile.TemporaryDirectory() as folder:
        names = add_libraries(html, folder)
    for page in html.glob("*.html"):
        rewrite(page, names)
    if references := list(left(html)):
        sys.exit("references to other servers are left:\n" + "\n".join(references))
    print(f"{html / 'index.html'}: no reference to another server is left")
    print(f"look at it with: python -m http.server --directory {html}")


if __name__ == "__main__":
    main()
