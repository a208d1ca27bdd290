"""The command line: ls, info, verify, scan and salvage. Torch is never imported, and nothing is before it is needed.

Data goes to stdout, words to stderr. Exit status: 0 all is well, 1 a file is damaged, unsafe or not to be read, 2 wrong usage.
"""

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec

from .terminal import printable

# What messages advise in Python's words, and what that is here.
HERE = {
    "overwrite=True replaces it": "--overwrite replaces it",
    " (verify=False reads it anyway)": "",
    ", or pass gzip.open(path)": "",
    ", or pass bz2.open(path)": "",
    ", or pass lzma.open(path)": "",
}

OK, BAD, INTERRUPTED = 0, 1, 128 + signal.SIGINT


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    if sys.stderr is None:  # closed; argparse would print its errors to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    options = parser().parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return options.command(options)
    except BrokenPipeError:  # whoever reads has enough, as head has
        return 128 + signal.SIGPIPE
    except Unwritten as error:
        say(f"standard output: {error}")
        return BAD
    except KeyboardInterrupt:
        return INTERRUPTED


def parser():
    made = argparse.ArgumentParser(
        prog=program(),
        description="Look into files that torch.save wrote, without torch and without running what is in them.",
        epilog="Exit status: 0 all is well, 1 a file is damaged, unsafe or not to be read, 2 wrong usage.",
    )
    made.add_argument("--version", action="version", version=f"%(prog)s {public('__version__')}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--debug", action="store_true", help="print the traceback of an error")
    commands = made.add_subparsers(metavar="COMMAND", required=True)

    def command(name, function, text):
        made = commands.add_parser(name, parents=[common], help=text, description=text)
        made.set_defaults(command=function)
        return made

    ls = command("ls", run_ls, "List the tensors of checkpoints.")
    ls.add_argument("files", metavar="FILE", nargs="+")
    info = command("info", run_info, "Say what checkpoints are.")
    info.add_argument("files", metavar="FILE", nargs="+")
    verify = command("verify", run_verify, "Read files whole and compare every checksum.")
    verify.add_argument("files", metavar="FILE", nargs="+")
    reading(verify)
    scan = command("scan", run_scan, "Say what the pickles of files would run.")
    scan.add_argument("files", metavar="FILE", nargs="+")
    salvage = command(
        "salvage", run_salvage, "Write what is left of a damaged checkpoint to a new one."
    )
    salvage.add_argument("broken", metavar="BROKEN")
    salvage.add_argument("out", metavar="OUT")
    salvage.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")
    reading(salvage)
    return made


def reading(command):
    """The options of commands that read whole files."""
    command.add_argument("--threads", type=positive, metavar="N", help="how many threads read")
    command.add_argument("--progress", action="store_true", help="show a bar (needs tqdm)")


def program():
    """How it was started."""
    name = os.path.basename(sys.argv[0])
    return f"python -m {__package__}" if name == "__main__.py" else name


def positive(text):
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return number


def public(name):
    """What the package offers under a name, imported now."""
    return getattr(import_module(__package__), name)


# -- commands -------------------------------------------------------------------------------------------------------


def run_ls(options):
    return each(options.files, options, headed(list_tensors, options.files))


def run_info(options):
    return each(options.files, options, headed(tell_info, options.files))


def headed(list_one, paths):
    """What lists one file, made to put its name above the text where there are several."""

    def listing(path):
        found = list_one(path)
        if len(paths) > 1:
            found.text = f"{printable(path)}:\n{found.text}\n"
            if isinstance(found.value, list):  # rows, which do not say whose they are
                found.value = {"name": path, "tensors": found.value}
        return found

    return listing


def run_verify(options):
    arguments = reading_arguments(options)
    return each(options.files, options, lambda path: public("verify")(path, **arguments))


def run_scan(options):
    return each(options.files, options, lambda path: public("scan")(path))


def run_salvage(options):
    salvage = public("salvage")
    arguments = {"overwrite": options.overwrite, **reading_arguments(options)}
    return each([options.broken], options, lambda path: salvage(path, options.out, **arguments))


def reading_arguments(options):
    """What the options of ``reading`` are to the functions that read."""
    progress = options.progress
    if progress and find_spec("tqdm") is None:
        say("--progress needs tqdm (pip install tqdm); it goes on without a bar")
        progress = False
    return {"threads": options.threads, "progress": progress or None}


class Listing:
    """Something to print: rows of columns or one object, in the form that reports have."""

    ok = True

    def __init__(self, value, text):
        self.value, self.text = value, text

    def as_dict(self):
        return self.value

    def __str__(self):
        return self.text


def list_tensors(path):
    with public("open")(path) as checkpoint:
        listing = import_module(".listing", __package__)
        rows = listing.tensor_rows(checkpoint)
        return Listing(rows, listing.table(rows))


def tell_info(path):
    with public("open")(path) as checkpoint:
        info = checkpoint.info
    width = max(map(len, info))
    # What a writer had to say may be any JSON, and is shown as such.
    if (told := info["metadata"]) is not None:
        told = json.dumps(told, ensure_ascii=False)
    # Of shards and what else is in them, names will do here.
    listed = {key: list(value) for key, value in info.items() if isinstance(value, dict)}
    values = info | listed | {"metadata": told}
    lines = [f"{key:{width}}  {shown(value)}" for key, value in values.items()]
    return Listing(info, "\n".join(lines))


def shown(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(printable, value)) or "-"
    return "-" if value is None else printable(str(value))


# -- printing -------------------------------------------------------------------------------------------------------


def each(paths, options, report_on):
    """Print the report on each file. JSON of one file is its object, of several a list of objects, errors among them."""
    status, printed = OK, []
    for path in paths:
        try:
            report = report_on(path)
            text = as_json(report.as_dict()) if options.json else shown_report(report)
        except (ValueError, OSError, RecursionError, ImportError) as error:
            if isinstance(error, BrokenPipeError) or options.debug:
                raise
            status = BAD
            message = reason(error, path)
            say(message)
            printed.append(as_json({"name": path, "ok": False, "error": message}))
            continue
        status = max(status, OK if report.ok else BAD)
        if options.json:
            printed.append(text)
        else:
            put(text)
    if options.json:
        put(printed[0] if len(paths) == 1 else "[\n" + ",\n".join(printed) + "\n]")
    return status


def as_json(value):
    return json.dumps(value, indent=2, allow_nan=False)


def shown_report(report):
    """A report, or a listing, as text."""
    text = printable(str(report), keep="\n")
    return text if isinstance(report, Listing) else in_words_of_here(text)


def in_words_of_here(text):
    for python, here in HERE.items():
        text = text.replace(python, here)
    return text


def reason(error, path):
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        name = path if error.filename is None else error.filename
        return f"{name or repr(name)}: {in_words_of_here(error.strerror)}"
    message = in_words_of_here(" ".join(str(error).split("\n")))
    # Python names no file when something in it is nested too deep.
    return f"{path}: {message}" if isinstance(error, RecursionError) else message


class Unwritten(Exception):
    """Standard output does not take what is printed."""


def put(text):
    """Print to standard output, at once. Raises BrokenPipeError, Unwritten."""
    if sys.stdout is None:  # it was closed when we were started
        raise Unwritten(os.strerror(errno.EBADF))
    try:
        print(text, flush=True)
    except OSError as error:
        # What is still buffered must not fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise Unwritten(error.strerror) from None


def say(message):
    """Print a line to standard error, if that takes it."""
    with contextlib.suppress(OSError):
        print(printable(f"{program()}: {message}"), file=sys.stderr, flush=True)
