"""verify= and progress= of load."""

import pathlib
import sys

import pytest
import torch

import fastckpt
from objects import Dripping, saved
from support import QUIET
from ziprewrite import records_of, rewritten, with_damage

pytestmark = QUIET

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc/self")


# -- checksums ---------------------------------------------------------------------------------------------------------


class TestVerify:
    DATA = saved(
        {
            f"t{i}": torch.full((n,), i, dtype=torch.float32)
            for i, n in enumerate((1, 10, 1000, 100_000))
        }
    )
    RECORDS = tuple(name for name in records_of(DATA) if name.startswith("data/"))

    @pytest.mark.parametrize("record", RECORDS)
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
    def test_a_flipped_byte(self, record, threads, below, tmp_path, monkeypatch):
        monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
        path = tmp_path / "file.pt"
        path.write_bytes(with_damage(self.DATA, record))
        for source in (path, path.read_bytes(), Dripping(path.read_bytes())):
            with pytest.raises(
                fastckpt.ChecksumError, match=f"'{record}' at byte .*verify=False reads it anyway"
            ) as caught:
                fastckpt.load(source, threads=threads)
            assert caught.value.record.endswith(record)
            loaded = fastckpt.load(source, verify=False, threads=threads)
            number = int(record.removeprefix("data/"))
            differs = [i for i in range(4) if not (loaded[f"t{i}"] == i).all()]
            assert differs == [number]

    def test_numpy(self):
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(with_damage(self.DATA, "data/1"), framework="numpy")

    def test_weights_only_false(self):
        with pytest.raises(fastckpt.ChecksumError):
            fastckpt.load(with_damage(self.DATA, "data/1"), weights_only=False)

    def test_the_pickle(self):
        with pytest.raises(fastckpt.ChecksumError, match=r"data\.pkl"):
            fastckpt.load(with_damage(self.DATA, "data.pkl"))

    def test_several(self):
        with pytest.raises(fastckpt.ChecksumError, match=r"data/1.*2 more records are wrong"):
            fastckpt.load(with_damage(self.DATA, "data/1", "data/2", "data/3"))

    def test_checksums_that_were_not_computed(self):
        fastckpt.load(with_damage(rewritten(self.DATA, crc=0), "data/1"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("below", ["0", ""], ids=["parallel", "serial"])
def test_progress(threads, below, monkeypatch):
    monkeypatch.setenv("FASTCKPT_SERIAL_BELOW", below)
    told = []
    fastckpt.load(
        TestVerify.DATA,
        threads=threads,
        progress=lambda done, total, name: told.append((done, total)),
    )
    total = 4 * (1 + 10 + 1000 + 100_000)
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_errors_of_progress_come_through():
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fastckpt.load(TestVerify.DATA, progress=stop)


def test_path_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        fastckpt.load(tmp_path / "nothing.pt")
    assert pathlib.Path(caught.value.filename).name == "nothing.pt"
