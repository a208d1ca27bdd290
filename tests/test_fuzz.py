"""The fuzzers themselves: mutants are reproducible and get past checksums, and what is wrong is found."""

import collections
import io
import os
import pathlib
import random
import signal
import tarfile
import zipfile

import pytest
import torch

import fastckpt
from fuzz import compare, contract, covered, mutate, pickles, ways, worker, zips
from fuzz.__main__ import Campaign
from fuzz.findings import Findings
from fuzz.mutate import CONTAINERS, FIXTURES, Mutator, seed_of
from support import QUIET
from zipcraft import archive, checkpoint

pytestmark = QUIET

NAMES = ("zip/containers.pt", "zip/deflated.pt", "legacy/shared_views.pt", "tar/views.pt")
SEEDS = [seed_of(name, (FIXTURES / name).read_bytes()) for name in NAMES]


def each_seed(function):
    return pytest.mark.parametrize("seed", SEEDS, ids=NAMES)(function)


def test_every_refusal_of_ours_alone_is_documented():
    text = (FIXTURES.parent / "docs" / "security.md").read_text()
    assert [rule for rule in compare.STRICTER if f"\n| {rule} | " not in text] == []


# -- mutants


def test_the_same_number_makes_the_same_mutants():
    first, again, other = Mutator(7, SEEDS), Mutator(7, SEEDS), Mutator(8, SEEDS)
    assert [first.mutant(i) for i in range(40)] == [again.mutant(i) for i in reversed(range(40))][
        ::-1
    ]
    assert first.mutant(3).data != other.mutant(3).data


def test_most_fixtures_come_apart():
    seeds = mutate.read_seeds()
    whole = [seed.name for seed in seeds if not seed.parts and not seed.name.startswith("refused/")]
    assert whole == ["zip/no_crc.pt"]  # zipfile takes its checksums of 0 for wrong ones


@each_seed
def test_parts_make_the_file_again(seed):
    expected = fastckpt.load(seed.data)
    for number in range(8):
        packed = CONTAINERS[seed.kind].packed(random.Random(number), list(seed.parts))
        assert compare.difference("load", expected, fastckpt.load(packed)) == []


ODD_ARCHIVES = {
    "stored": {}, "deflated": {"method": 8}, "zip64": {"wide": True}, "descriptors": {"descriptor": True},
}  # fmt: skip


@pytest.mark.parametrize("options", ODD_ARCHIVES.values(), ids=ODD_ARCHIVES)
def test_checksums_are_right_after_repair(options):
    entries = checkpoint([b"abcd" * 100])
    for entry in entries:
        for name, value in options.items():
            setattr(entry, name, value)
        entry.__post_init__()
        entry.crc ^= 0x5555
    damaged = archive(entries, wide=True)
    with zipfile.ZipFile(io.BytesIO(damaged)) as file:
        assert file.testzip()
    with zipfile.ZipFile(io.BytesIO(zips.repaired(damaged))) as file:
        assert file.testzip() is None


def test_tar_headers_are_right_after_repair():
    data = bytearray(SEEDS[-1].data)
    data[100] ^= 1  # the mode
    with pytest.raises(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(data)):
        pass
    with tarfile.open(fileobj=io.BytesIO(CONTAINERS["tar"].repaired(bytes(data)))) as file:
        assert file.getnames()


@pytest.mark.parametrize("name", pickles.MUTATIONS)
def test_every_mutation_of_pickles_changes_something(name):
    data = next(part.data for part in SEEDS[0].parts if part.kind == "pickle")
    changed = 0
    for number in range(20):
        ops = pickles.split(data)
        pickles.MUTATIONS[name](random.Random(number), ops, [data])
        changed += b"".join(ops) != data
    assert changed > 5


# -- what is wrong is found


def escape():
    with open(pickles.MARKER, "w"):
        pass


def swallow():
    """Runs something and hides it."""
    try:
        eval("1")
    except BaseException:
        pass


def burn():
    sum(range(30_000_000))


def refuse():
    raise fastckpt.FormatError("bad")


FAULTS = {
    "another error": (lambda: {}["a"], "exception"),
    "no error of ours": (lambda: [].index(0), "exception"),
    "out of memory": (lambda: bytearray(1 << 60), "exception"),
    "a file is written": (escape, "escape"),
    "code is run, and hidden": (swallow, "escape"),
    "a module is imported": (lambda: __import__("this"), "escape"),
    "a process is started": (lambda: os.system("true"), "escape"),
    "memory": (lambda: len(b"a" * (contract.MOST_NBYTES + (200 << 20))), "memory"),
    "time": (burn, "slow"),
    "a refusal": (refuse, None),
    "a missing file": (lambda: open("no such file"), None),  # noqa: SIM115
    "a value": (lambda: 1, None),
}


@pytest.fixture(scope="module")
def guard():
    return contract.Guard()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault, guard, tmp_path, monkeypatch):
    read, kind = fault
    monkeypatch.chdir(tmp_path)
    if kind == "slow":
        monkeypatch.setattr(contract, "MOST_SECONDS", 0.2)
    outcome = guard.call("way", read)
    found = {finding.kind for finding in outcome.findings}
    assert found == ({kind} if kind else set())


def test_a_payload_that_ran_natively_is_found(guard, tmp_path, monkeypatch):
    """No audit event tells of it, but it leaves its marker."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / pickles.MARKER).mkdir()
    outcome = guard.call("way", lambda: None)
    assert [finding.key for finding in outcome.findings] == ["marker"]
    assert not os.listdir(tmp_path)


ZEROS, ONES = (
    contract.Outcome({"x": make(3)}, contract.LOADED) for make in (torch.zeros, torch.ones)
)
CHECKSUM = contract.Outcome(
    None,
    "ChecksumError",
    fastckpt.ChecksumError("f.pt: record 'data/0' at byte 64: CRC-32 is 0, ..."),
)
SOMETHING = contract.Outcome(None, "FormatError", fastckpt.FormatError("f.pt: something new"))
PAIRS = {  # torch's outcome, ours
    "the same": (ZEROS, ZEROS, "both", None),
    "other values": (ZEROS, ONES, "both", "differs"),
    "ours alone": (SOMETHING, ZEROS, "ours alone", None),
    "neither": (SOMETHING, CHECKSUM, "neither", None),
    "a documented refusal": (ZEROS, CHECKSUM, "torch alone", None),
    "another": (ZEROS, SOMETHING, "torch alone", "stricter"),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS.values(), ids=PAIRS)
def test_torch_is_compared(case):
    theirs, ours, word, kind = case
    found, findings = compare.compared(theirs, ours, b"")
    assert (found, [finding.kind for finding in findings]) == (word, [kind] if kind else [])


Report = collections.namedtuple("Report", "ok")
WELL, ILL = (contract.Outcome(Report(ok), contract.LOADED) for ok in (True, False))
VERIFY, SCAN = ways.REPORTS
UNSAFE = contract.Outcome(
    None,
    "UnsafePickleError",
    fastckpt.UnsafePickleError("f.pt: the pickle names x.Y, which is not known to be plain data"),
)
WAYS = {  # a way, its outcome, that of load
    "the same object": (ways.load_mapped, ZEROS, ZEROS, None),
    "another object": (ways.load_mapped, ONES, ZEROS, "differs"),
    "refused one way": (ways.load_parallel, SOMETHING, ZEROS, "disagrees"),
    "read one way": (ways.load_parallel, ZEROS, SOMETHING, "disagrees"),
    "mapped, so not verified": (ways.load_mapped, ZEROS, CHECKSUM, None),
    "not verified": (ways.load_parallel, ZEROS, CHECKSUM, "disagrees"),
    "ways that differ": (ways.numpy, ONES, SOMETHING, None),
    "verify on a good file": (VERIFY, WELL, ZEROS, None),
    "verify on a file that is refused": (VERIFY, WELL, CHECKSUM, "disagrees"),
    "verify finds something": (VERIFY, ILL, ZEROS, None),
    "verify on an unsafe pickle": (VERIFY, WELL, UNSAFE, None),
    "scan on an unsafe pickle": (SCAN, WELL, UNSAFE, "disagrees"),
    "salvage": (ways.salvage, ONES, ZEROS, "differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", WAYS.values(), ids=WAYS)
def test_ways_are_compared(case):
    way, outcome, load, kind = case
    findings = compare.disagreement(way, outcome, load)
    assert [finding.kind for finding in findings] == ([kind] if kind else [])


@each_seed
def test_good_files_are_read_every_way(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = worker.Reader()
    reader.warm_up([seed])
    statuses, word, findings = reader.read(mutate.Mutant(0, seed.name, (), seed.data))
    assert findings == []
    assert statuses.pop("verify on torch.load") == "right"
    assert statuses == {way.__name__: "loaded" for way in ways.EVERY_WAY}
    assert word == ("ours alone" if seed.kind == "tar" else "both")


DEATHS = {
    "crash": lambda: signal.raise_signal(signal.SIGSEGV),
    "hang": signal.pause,
}


@pytest.mark.parametrize("kind", DEATHS)
def test_a_worker_that_dies_is_a_finding(kind, tmp_path, monkeypatch):
    """The mutants behind the one that it died of are read by another."""
    load = fastckpt.load

    def planted(f, **options):
        if isinstance(f, str) and pathlib.Path(f).read_bytes() == mutator.mutant(1).data:
            DEATHS[kind]()
        return load(f, **options)

    mutator = Mutator(0, SEEDS[:1])
    monkeypatch.setattr(fastckpt, "load", planted)
    if kind == "hang":  # a crash is to be found long before
        monkeypatch.setattr(worker, "HANG_SECONDS", 5)
    campaign = Campaign(mutator, Findings(tmp_path))
    campaign.run(jobs=1, minutes=1, most=3)
    assert campaign.mutants == 3
    assert [key[:2] for key in campaign.findings.alike] == [(kind, "load")]
    (folder,) = tmp_path.iterdir()
    assert (folder / "mutant.pt").read_bytes() == mutator.mutant(1).data
    assert "mutant 1 of zip/containers.pt" in (folder / "report.txt").read_text()
    assert f"1 {kind} | load" in campaign.report()


# -- led by coverage


def test_what_is_missing_is_named():
    assert covered.require("no-such-clang").startswith("no-such-clang is missing")


def test_corpora_have_what_their_target_reads(tmp_path):
    for target in covered.TARGETS:
        covered.write_corpus(tmp_path / target, target)
        assert len(list((tmp_path / target).iterdir())) > 10
