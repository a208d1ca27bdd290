"""The command line: what it prints, its exit status, and what it never does."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import cli
from fastckpt.terminal import printable
from picklecraft import craft
from zipcraft import Entry, archive, checkpoint

SOURCES = Path(fastckpt.__file__).parent.parent


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.pt"
    weight = torch.arange(6.0).reshape(2, 3)
    torch.save({"weight": weight, "nested": {"tied": weight[1]}, "n": torch.tensor(3)}, path)
    return path


@pytest.fixture
def damaged(tmp_path, model):
    data = bytearray(model.read_bytes())
    data[data.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    path = tmp_path / "damaged.pt"
    path.write_bytes(data)
    return path


@pytest.fixture
def run(capsys):
    """Run a command here: (exit status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def command(*arguments, **options):
    """The command line in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "fastckpt", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def finished(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# -- ls


def test_ls(run, model):
    status, out, err = run("ls", model)
    assert (status, err) == (0, "")
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    assert lines[0][:2] == ["name", "dtype"]
    assert [line[0] for line in lines[1:]] == ["weight", "nested.tied", "n"]
    assert out.splitlines()[1].startswith("weight       float32  (2, 3)")
    ends = {len(line) for line in out.splitlines()}
    assert len(ends) == 1, "columns are not aligned"


def test_ls_says_where_tensors_are(run, model):
    status, out, _ = run("ls", "--json", model)
    rows = json.loads(out)
    assert status == 0
    data = model.read_bytes()
    by_name = {row["name"]: row for row in rows}
    row = by_name["nested.tied"]
    assert (row["dtype"], row["shape"], row["nbytes"]) == ("float32", [3], 12)
    values = data[row["offset"] : row["offset"] + row["nbytes"]]
    assert values == torch.tensor([3.0, 4, 5]).numpy().tobytes()
    assert by_name["n"]["shape"] == []


def test_ls_tells_names_apart(run, tmp_path):
    path = tmp_path / "alike.pt"
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, path)
    rows = json.loads(run("ls", "--json", path)[1])
    assert [row["name"] for row in rows] == ["('a', 'b')", "('a.b',)"]


@pytest.mark.parametrize("name", ["quantized_by_channel", "sparse_coo_hybrid", "deflated", "meta"])
def test_ls_of_what_has_no_one_place(run, name):
    path = Path(__file__).parent.parent / "fixtures" / "zip" / f"{name}.pt"
    status, out, _ = run("ls", path)
    assert status == 0
    assert any(line.endswith("-") for line in out.splitlines())


@pytest.mark.parametrize("name", ["ls", "info"])
def test_several_files(run, model, tmp_path, name):
    other = tmp_path / "other.pt"
    fastckpt.save({"other": torch.ones(2)}, other)
    nowhere = tmp_path / "nowhere"
    status, out, err = run(name, model, nowhere, other)
    assert (status, err.count("\n")) == (1, 1)
    assert out == "".join(f"{path}:\n{run(name, path)[1]}\n" for path in (model, other))
    status, out, _ = run(name, "--json", model, nowhere, other)
    found = json.loads(out)
    assert [each["name"] for each in found] == [str(model), str(nowhere), str(other)]
    assert "No such file" in found[1]["error"]
    alone = json.loads(run(name, "--json", other)[1])
    assert found[2] == ({"name": str(other), "tensors": alone} if name == "ls" else alone)


def test_ls_of_a_file_that_lacks_a_storage(run, tmp_path, model):
    path = tmp_path / "other.pt"
    path.write_bytes(model.read_bytes().replace(b"model/data/0", b"model/data/9"))
    status, out, _ = run("ls", path)
    assert status == 0
    assert "weight" in out


# -- info, verify


def test_info(run, model):
    status, out, _ = run("info", model)
    assert status == 0
    info = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (info["container"], info["tensors"], info["unknown"]) == ("zip", "3", "-")
    assert info["huge_pages"] in ("always", "madvise", "never", "off")
    found = json.loads(run("info", "--json", model)[1])
    assert found["tensors"] == 3


@pytest.mark.parametrize(
    "metadata", [[1, 2], [None], [["a"]], [], ["a"], {"a": [True]}, "\ud800\n", 0, 1.5, False],
    ids=repr,
)  # fmt: skip
def test_info_of_any_metadata(run, tmp_path, metadata):
    path = tmp_path / "model.pt"
    fastckpt.save(1, path, metadata=metadata)
    status, out, _ = run("info", path)
    assert status == 0
    line = next(line for line in out.splitlines() if line.startswith("metadata"))
    assert line.split(maxsplit=1)[1] == printable(json.dumps(metadata, ensure_ascii=False))
    assert json.loads(run("info", "--json", path)[1])["metadata"] == metadata


def test_info_of_numbers_that_json_has_not(run, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(archive(checkpoint(metadata__json=b'{"a": NaN}')))
    assert json.loads(run("info", "--json", path)[1])["metadata"] is None


@pytest.mark.parametrize("depth", [100, 900])
def test_info_of_deep_metadata(run, tmp_path, depth):
    """Shown or refused in one line, whatever depth Python still takes."""
    path = tmp_path / "model.pt"
    path.write_bytes(archive(checkpoint(metadata__json=b"[" * depth + b"]" * depth)))
    for options in ([], ["--json"]):
        status, out, err = run("info", *options, path)
        assert "Traceback" not in err
        assert err.count("\n") == status
        assert str(path) in out + err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("", "never"), (None, "never")],
)  # fmt: skip
def test_huge_pages(tmp_path, monkeypatch, text, expected):
    from fastckpt.memory import huge_pages

    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.delenv("FASTCKPT_HUGEPAGES", raising=False)
    assert huge_pages(path) == expected
    monkeypatch.setenv("FASTCKPT_HUGEPAGES", "0")
    assert huge_pages(path) == "off"


def test_verify(run, model, damaged):
    status, out, err = run("verify", model)
    assert (status, err) == (0, "")
    assert f"{model}: ok" in out
    status, out, err = run("verify", "--threads", 2, model, damaged)
    assert (status, err) == (1, "")
    assert f"{model}: ok" in out
    assert f"{damaged}: DAMAGED" in out
    assert "CRC-32 is" in out


def test_verify_of_files_of_all_kinds(run, model, damaged, tmp_path):
    """Each has its report, in order, whatever the others are."""
    others = {
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "cut": model.read_bytes()[:-9],
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    status, out, err = run("verify", tmp_path / "pointer", tmp_path / "cut", damaged, model)
    assert (status, err) == (1, "")
    words = ["pointer: NO CHECKPOINT", "cut: DAMAGED (zip", "damaged.pt: DAMAGED", "model.pt: ok"]
    places = [out.index(word) for word in words]
    assert places == sorted(places)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    fastckpt.save_sharded({name: torch.ones(99) for name in "abc"}, folder, max_shard_bytes=500)
    return folder


INDEX = "pytorch_model.bin.index.json"


@pytest.mark.parametrize("name", ["ls", "info", "verify", "scan"])
def test_shards(run, shards, name):
    status, out, err = run(name, shards)
    assert (status, err) == (0, "")
    assert run(name, shards / INDEX) == (status, out, err)
    assert out.count("pytorch_model-00001-of-00003.bin") == 1
    assert json.loads(run(name, "--json", shards)[1])


def test_ls_of_shards(run, shards):
    rows = json.loads(run("ls", "--json", shards)[1])
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    for row in rows:
        data = (shards / row["file"]).read_bytes()[row["offset"] :]
        assert data[: row["nbytes"]] == torch.ones(99).numpy().tobytes()


def test_a_damaged_shard(run, shards):
    path = shards / "pytorch_model-00002-of-00003.bin"
    path.write_bytes(path.read_bytes()[:-30])
    status, out, _ = run("verify", shards)
    assert status == 1
    assert f"{path}: DAMAGED" in out
    assert out.count(": ok") == 2
    status, out, err = run("salvage", shards, shards / "out.pt")
    assert (status, out) == (1, "")
    assert "salvage takes one: verify says which shards are damaged" in err


def test_verify_as_json(run, model, damaged, tmp_path):
    status, out, _ = run("verify", "--json", model)
    assert (status, json.loads(out)["ok"]) == (0, True)
    status, out, err = run("verify", "--json", model, damaged, tmp_path / "nowhere")
    found = json.loads(out)
    assert status == 1
    assert [each["ok"] for each in found] == [True, False, False]
    assert found[1]["findings"][0]["kind"] == "crc_mismatch"
    assert "No such file" in found[2]["error"]
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["verify", "salvage"])
@pytest.mark.parametrize("there", [True, False], ids=["tqdm", "no tqdm"])
def test_progress(run, model, tmp_path, monkeypatch, name, there):
    if there:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setattr(cli, "find_spec", lambda name: None)
    out_path = [tmp_path / "out.pt"] if name == "salvage" else []
    status, out, err = run(name, "--progress", "--threads", "2", model, *out_path)
    assert status == 0
    assert "ok" in out or "3 tensors kept" in out
    assert ("--progress needs tqdm (pip install tqdm)" in err) == (not there)
    assert ("model.pt" in err) == there


def test_messages_advise_in_words_of_the_command_line(run, model, damaged, tmp_path):
    (tmp_path / "packed").write_bytes(b"\x1f\x8b" + bytes(20))
    (tmp_path / "pickle.pt").write_bytes(archive([Entry("a/data.pkl", craft({}), crc=1)]))
    said = []
    for arguments in (
        ["salvage", damaged, model],
        ["verify", damaged],
        ["ls", tmp_path / "pickle.pt"],
        ["info", tmp_path / "packed"],
        ["verify", tmp_path / "packed"],
    ):
        status, out, err = run(*arguments)
        assert status == 1
        said.append((out + err).replace("torch.load(weights_only=True)", ""))
    assert "--overwrite replaces it" in said[0]
    assert "CRC-32" in said[1]
    assert "CRC-32" in said[2]
    assert all("unpack it first" in text for text in said[3:])
    assert not re.search(r"\w+=\w|\w\(\w", "".join(said).replace(str(tmp_path), ""))


# -- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "{pointer}"], "git-lfs pointer"),
        (["ls", "{nowhere}"], "nowhere: No such file"),
        (["info", "{folder}"], "a folder without pytorch_model.bin or pytorch_model.bin.index.json"),
        (["verify", "{folder}"], "such as 'a.pt'"),
        (["scan", "{folder}"], "give the path of a file"),
        (["salvage", "{folder}", "out.pt"], "give the path of a file"),
        (["verify", "{empty}"], "an empty folder"),
        (["scan", "--json", "{empty}"], "an empty folder"),
        (["ls", "{pointer}", "{nowhere}"], "git-lfs pointer"),
        (["verify", "--threads", "2147483648", "{nowhere}"], "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_errors_are_one_line_each(run, tmp_path, arguments, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.pt").touch()
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    places = {name: str(tmp_path / name) for name in ("pointer", "nowhere", "empty")}
    places["folder"] = str(tmp_path)
    arguments = [argument.format(**places) for argument in arguments]
    status, out, err = run(*arguments)
    assert status == 1
    assert out == "" or "--json" in arguments
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == sum(argument in places.values() for argument in arguments)


def test_debug_shows_where(run, tmp_path):
    with pytest.raises(FileNotFoundError):
        run("ls", "--debug", tmp_path / "nowhere")


@pytest.mark.parametrize(
    "arguments",
    [[], ["list"], ["ls"], ["verify"], ["verify", "--threads", "0", "a"], ["salvage", "a"], ["ls", "--no", "a"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_usage(run, arguments):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "usage:" in err


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0
    assert fastckpt.__version__ in out


# -- scan and salvage


@pytest.mark.parametrize("name", ["scan", "salvage"])
def test_reports_of_others(run, model, tmp_path, name):
    out_path = [tmp_path / "out.pt"] if name == "salvage" else []
    status, out, err = run(name, model, *out_path)
    assert (status, err) == (0, "")
    assert out
    if name == "salvage":
        assert run(name, model, *out_path)[0] == 1  # it exists by now
        assert run(name, model, *out_path, "--overwrite")[0] == 0
        assert fastckpt.load(out_path[0])["n"] == 3
    else:
        assert json.loads(run(name, "--json", model)[1])["ok"] is True


# -- terminals


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer.0/weight [x]", "layer.0/weight [x]"),
        ("größe 重み", "größe 重み"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r", r"a\nb\r"),
        ("\x9b1m\x7f", r"\x9b1m\x7f"),
        ("abc\u202ecba", r"abc\u202ecba"),
        ("\udcff", r"\udcff"),
    ],
    ids=["plain", "letters", "escape", "newline", "C1", "right to left", "no character"],
)
def test_printable(text, expected):
    assert printable(text) == expected


def test_names_do_nothing_to_a_terminal(run, tmp_path):
    path = tmp_path / "evil.pt"
    name = "\x1b]0;owned\x07\x1b[2K\rgood\n\u202e\udc80"
    pickle = craft({name: torch_tensor(), "é": torch_tensor()})
    path.write_bytes(archive(checkpoint((b"1234",), **{"data.pkl": pickle})))
    for arguments in (["ls"], ["ls", "--json"], ["verify"], ["verify", "--json"], ["info"]):
        status, out, _ = run(*arguments, path)
        assert status == 0
        assert out.replace("\n", "").isprintable()
    assert len(run("ls", path)[1].splitlines()) == 3


def torch_tensor():
    from test_verify import tensor

    return tensor("0", 1)


def test_a_narrow_encoding(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"重み": torch.ones(1)}, path)
    status, out, _ = finished(command("ls", path, env={"PYTHONIOENCODING": "ascii"}))
    assert status == 0
    assert r"\u91cd\u307f" in out


# -- processes


def test_a_reader_that_has_enough(tmp_path):
    path = tmp_path / "many.pt"
    torch.save({f"layer.{i}.weight": torch.ones(1) for i in range(5000)}, path)
    process = command("ls", path)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=300) == 128 + signal.SIGPIPE
    assert err == ""


@pytest.mark.parametrize("arguments", [["ls"], ["verify", "--json"]], ids=" ".join)
@pytest.mark.parametrize(
    ("redirection", "words"), [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")]
)  # fmt: skip
def test_an_output_that_takes_nothing(model, arguments, redirection, words):
    status, out, err = finished(shell(redirection, *arguments, model))
    assert (status, out) == (1, "")
    assert err == f"python -m fastckpt: standard output: {words}\n"


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_errors_that_nobody_takes(tmp_path, redirection):
    assert finished(shell(redirection, "ls", tmp_path / "nowhere")) == (1, "", "")
    assert finished(shell(redirection, "ls"))[:2] == (2, "")


def shell(redirection, *arguments):
    """The command line with some of its files elsewhere."""
    line = f'exec "$@" {redirection}'
    return subprocess.Popen(
        ["sh", "-c", line, "sh", sys.executable, "-m", "fastckpt", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )


def test_salvage_to_no_name(run, damaged):
    status, out, err = run("salvage", damaged, "")
    assert (status, out) == (1, "")
    assert err.endswith(": '': No such file or directory\n")


def test_ctrl_c(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    process = command("verify", path)
    writer = os.open(path, os.O_WRONLY)  # it is there, and waits
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    status, out, err = finished(process)
    os.close(writer)
    assert (status, out, err) == (130, "", "")


@pytest.mark.parametrize("arguments", [["ls"], ["info"], ["verify"]], ids=" ".join)
def test_torch_is_not_imported(model, arguments):
    script = (
        "import sys\n"
        "from fastckpt.cli import main\n"
        f"status = main({[*arguments, str(model)]!r})\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_help_imports_next_to_nothing():
    script = (
        "import sys\n"
        "from fastckpt.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not sys.modules.keys() & {'numpy', 'torch', 'fastckpt.checkpoint'}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_console_script_is_declared():
    import tomllib

    project = Path(__file__).parent.parent / "pyproject.toml"
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    module, _, function = scripts["fastckpt"].partition(":")
    assert importlib.util.find_spec(module) is not None
    assert function == "main"
