"""Mutants: every one is a function of a seed number and an index, whoever asks for it and in whatever order."""

import dataclasses
import pathlib
import random

from . import pickles, streams, zips
from .numbers import masked, near
from .part import Part

FIXTURES = pathlib.Path(__file__).resolve().parent.parent.parent / "fixtures"
REPAIR_SHARE = 0.85  # of mutants get their checksums made right
REFUSED_SHARE = 0.05  # are made of files that are refused as they stand
KIND_WEIGHTS = {"pickle": 12, "number": 4, "data": 3, "text": 1}
TEXTS = (b"", b"little", b"big", b"native", b"3\n", b"1", b"10\n", b"11\n", b"-1", b"3", b"9" * 30)
NAMES = ("archive/data.pkl", "archive/byteorder", "archive/version", "archive/.data/version", "archive/data/0", "archive/data/1",
         "archive/constants.pkl", "other/data.pkl", "data.pkl", "archive\\data\\0", "", "/", "archive/data/", "archive/tensors/0",
         "pickle", "tensors", "storages", "sys_info", "./pickle", "archive/data/\udcff", "archive/code/data.pkl")  # fmt: skip


def nothing(data):
    return []


def unchanged(data):
    return data


@dataclasses.dataclass(frozen=True)
class Container:
    """How to take files of one kind apart, put them together, and make their checksums right."""

    parts_of: callable
    packed: callable
    numbers_of: callable
    repaired: callable


CONTAINERS = {
    "zip": Container(zips.parts_of, zips.packed, zips.numbers_of, zips.repaired),
    "legacy": Container(streams.legacy_parts, streams.legacy_packed, nothing, unchanged),
    "tar": Container(
        streams.tar_parts, streams.tar_packed, streams.tar_numbers, streams.tar_repaired
    ),
}


@dataclasses.dataclass(frozen=True)
class Seed:
    """A file to begin with; ``parts`` is empty where it cannot be taken apart, as many that are to be refused."""

    name: str
    kind: str
    data: bytes
    parts: tuple


@dataclasses.dataclass(frozen=True)
class Mutant:
    index: int
    name: str  # of the file it was made from
    steps: tuple
    data: bytes


def read_seeds(folder=FIXTURES):
    """All fixtures, in an order that does not depend on the machine."""
    return [
        seed_of(path.relative_to(folder).as_posix(), path.read_bytes())
        for path in sorted(folder.glob("*/*.pt"))
    ]


def seed_of(name, data):
    """A file as a seed, taken apart where that can be done."""
    kind = kind_of(data)
    try:
        parts = tuple(CONTAINERS[kind].parts_of(data))
    except Exception:  # what is damaged is changed as it stands
        parts = ()
    return Seed(name, kind, data, parts)


def kind_of(data):
    if data[257:262] == b"ustar":
        return "tar"
    return "zip" if b"PK\3\4" in data[:64] else "legacy"


class Mutator:
    """Makes the mutants of one seed number."""

    def __init__(self, number, seeds=None):
        self.number = number
        self.seeds = read_seeds() if seeds is None else seeds
        self.refused = [seed for seed in self.seeds if seed.name.startswith("refused/")]
        self.good = [seed for seed in self.seeds if seed not in self.refused]
        self.pickles = [
            part.data for seed in self.seeds for part in seed.parts if part.kind == "pickle"
        ]

    def mutant(self, index):
        rng = random.Random(f"{self.number}/{index}")
        seed = rng.choice(
            self.refused
            if self.refused and rng.random() < REFUSED_SHARE
            else self.good or self.refused
        )
        data, steps = self.change(rng, seed)
        return Mutant(index, seed.name, tuple(steps), data)

    def change(self, rng, seed):
        """Change a seed: (bytes, what was done)."""
        container, steps, data = CONTAINERS[seed.kind], [], seed.data
        if seed.parts and rng.random() < 0.8:
            parts = [dataclasses.replace(part) for part in seed.parts]
            for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 4))):
                steps.append(self.change_parts(rng, parts))
            data = container.packed(rng, parts)
        if not steps or rng.random() < 0.1:
            for _ in range(rng.choice((1, 1, 1, 2))):
                data, step = self.change_bytes(rng, data, container)
                steps.append(step)
        if rng.random() < REPAIR_SHARE:
            data = container.repaired(data)
            steps.append("repaired")
        return data, steps

    # -- parts

    def change_parts(self, rng, parts):
        """Change one of the parts, or the list of them; a word for it."""
        if not parts or rng.random() < 0.12:
            return self.rearrange(rng, parts)
        kinds = sorted({part.kind for part in parts})
        (wanted,) = rng.choices(kinds, [KIND_WEIGHTS[kind] for kind in kinds])
        part = rng.choice([part for part in parts if part.kind == wanted])
        if part.kind == "pickle":
            part.data, step = pickles.mutate(rng, part.data, self.pickles)
            return f"pickle {step}"
        if part.kind == "number":
            part.data = masked(
                near(rng, int.from_bytes(part.data, "little", signed=True)), len(part.data)
            )
        elif part.kind == "text":
            part.data = rng.choice(TEXTS)
        elif rng.random() < 0.5:
            part.data = pickles.flip(rng, part.data)
        else:
            part.data = (part.data + b"\1" * 9)[
                : max(0, len(part.data) + rng.choice((-8, -4, -1, 1, 4, 8)))
            ]
        return part.kind

    def rearrange(self, rng, parts):
        """Remove, repeat, reorder, rename or borrow a part."""
        way = rng.choice(("remove", "repeat", "reorder", "rename", "borrow")) if parts else "borrow"
        at = rng.randrange(len(parts)) if parts else 0
        if way == "remove":
            del parts[at]
        elif way == "repeat":
            parts.insert(rng.randrange(len(parts) + 1), dataclasses.replace(parts[at]))
        elif way == "reorder":
            parts.insert(rng.randrange(len(parts)), parts.pop(at))
        elif way == "rename":
            parts[at].name = rng.choice((*NAMES, rng.choice(parts).name))
        else:
            other = rng.choice(self.seeds)
            lent = rng.choice(other.parts or (Part("archive/data/0", "data", other.data[:999]),))
            name = rng.choice(parts).name if parts else lent.name
            parts[at : at + rng.choice((0, 1))] = [dataclasses.replace(lent, name=name)]
        return way

    # -- bytes

    def change_bytes(self, rng, data, container):
        """Change a file as it stands; (bytes, a word)."""
        numbers = container.numbers_of(data)
        if numbers and rng.random() < 0.6:
            return change_number(rng, data, numbers), "header"
        way = rng.choice(("flip", "truncate", "remove", "repeat", "zeros", "splice", "grow"))
        if way == "flip" or not data:
            return pickles.flip(rng, data), "flip"
        a, n = rng.randrange(len(data)), rng.choice((1, 4, 8, 46, 64, 512))
        if way == "truncate":
            return data[:a] if rng.random() < 0.5 else data[: -rng.choice((1, 2, 22, 64))], way
        if way == "remove":
            return data[:a] + data[a + n :], way
        if way == "repeat":
            return data[: a + n] + data[a:], way
        if way == "zeros":
            return data[:a] + bytes(len(data[a : a + n])) + data[a + n :], way
        other = rng.choice(self.seeds).data
        if way == "splice":
            b = rng.randrange(len(other))
            return data[:a] + other[b : b + rng.choice((n, len(other)))] + data[
                a + rng.choice((0, n)) :
            ], way
        return (data + other if rng.random() < 0.5 else other + data), way


def change_number(rng, data, numbers):
    """One number of a header: near what it was, or what another one is."""
    at, nbytes = rng.choice(numbers)
    if rng.random() < 0.2:
        other, width = rng.choice(numbers)
        value = int.from_bytes(data[other : other + width], "little")
    elif rng.random() < 0.1:
        value = len(data)
    else:
        value = near(rng, int.from_bytes(data[at : at + nbytes], "little"))
    # A tar has its numbers in octal.
    octal = data[at : at + nbytes].strip(b" \0").isdigit() and nbytes >= 8 and rng.random() < 0.7
    new = b"%0*o\0" % (nbytes - 1, value % 8 ** (nbytes - 1)) if octal else masked(value, nbytes)
    return data[:at] + new + data[at + nbytes :]
