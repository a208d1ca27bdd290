"""Whole files into memory: each sample is the first load of a process."""

import os

from .common import LARGE_MB, SMALL_MB, WHOLE, Fresh, Repeated, container_for, needed, path_of

# What is loaded: file, container, and whether its pages are in the page cache.
FILES = {
    f"ZIP, {SMALL_MB} MB": ("small", "zip", "warm"),
    f"ZIP, {LARGE_MB} MB": ("large", "zip", "warm"),
    f"ZIP, {LARGE_MB} MB, cold": ("large", "zip", "cold"),
    f"legacy, {LARGE_MB} MB": ("large", "legacy", "warm"),
}


class Load(Fresh):
    params = [list(WHOLE), list(FILES)]
    param_names = ["reader", "file"]

    def setup(self, folder, reader, file):
        name, container, cache = FILES[file]
        self.path = path_of(folder, name, container_for(reader, container))
        self.start_fresh(folder, WHOLE[reader](), self.path, cache == "cold")

    def time_load(self, folder, reader, file):
        self.measure(self.path)


SETTINGS = {
    "default": ({}, {}),
    "threads=1": ({"threads": 1}, {}),
    "verify=False": ({"verify": False}, {}),
    "FASTCKPT_CRC=portable": ({}, {"FASTCKPT_CRC": "portable"}),
    "FASTCKPT_HUGEPAGES=0": ({}, {"FASTCKPT_HUGEPAGES": "0"}),
}


class Settings(Fresh):
    """What each part of a load is worth: the large file with one thing changed."""

    params = [list(SETTINGS)]
    param_names = ["setting"]

    def setup(self, folder, setting):
        options, environment = SETTINGS[setting]
        os.environ.update(environment)
        load = WHOLE["fastckpt"]()
        self.path = path_of(folder, "large", "zip")
        self.start_fresh(folder, lambda path: load(path, **options), self.path)

    def time_load_with(self, folder, setting):
        self.measure(self.path)


class LoadInto(Fresh):
    """Into the parameters of a model that is there."""

    params = [["torch.load", "fastckpt"]]
    param_names = ["reader"]

    def setup(self, folder, reader):
        self.path = path_of(folder, "large", "zip")
        self.start_fresh(folder, loader_into(reader), self.path)
        self.model = model_for(self.path)

    def time_load_into(self, folder, reader):
        self.measure(self.path, self.model)


def loader_into(reader):
    """A callable of a path and a model; without a model it makes one."""
    if reader == "torch.load":
        import torch

        return lambda path, model=None: (model or model_for(path)).load_state_dict(torch.load(path))
    import fastckpt

    if not hasattr(fastckpt, "load_into"):
        raise NotImplementedError("this version has no load_into")
    return lambda path, model=None: fastckpt.load_into(model or model_for(path), path)


def model_for(path):
    """A module whose state dict has the names and shapes of a file, and memory of its own."""
    import torch

    model = torch.nn.Module()
    for name, tensor in torch.load(path, mmap=True).items():
        *layer, last = name.split(".")
        part = torch.nn.Module() if layer else model
        part.register_parameter(last, torch.nn.Parameter(torch.ones_like(tensor)))
        if layer:
            model.add_module("".join(layer), part)
    return model


class Memory(Fresh):
    """The peak of the process: what is imported counts, the same for all."""

    rounds = 1
    params = [list(WHOLE)]
    param_names = ["reader"]

    def setup(self, folder, reader):
        self.path = path_of(folder, "large", container_for(reader))
        self.prepare(WHOLE[reader](), path_of(folder, "tiny", container_for(reader)))

    def peakmem_load(self, folder, reader):
        self.measure(self.path)


class Many(Repeated):
    """Ten thousand small tensors; nobody clones here, the work is in making them."""

    params = [["torch.load", "torch.load, mmap", "safetensors", "fastckpt", "fastckpt, mmap"]]
    param_names = ["reader"]

    def setup(self, folder, reader):
        self.path = path_of(folder, "many", container_for(reader))
        self.prepare(plain(reader), self.path)

    def time_load_many(self, folder, reader):
        self.measure(self.path)


def plain(reader):
    """A callable of a path that gives the tensors as the reader has them, mapped or not."""
    name, _, mapped = reader.partition(", ")
    if name == "safetensors":
        return needed("safetensors.torch").load_file
    load = WHOLE[name]()
    return (lambda path: load(path, mmap=True)) if mapped else load


class Save(Fresh):
    """To a file system in memory, where there is one; a new file each time."""

    params = [["torch.save", "fastckpt.save"], ["large", "many"]]
    param_names = ["writer", "tensors"]

    def setup(self, folder, writer, tensors):
        import fastckpt

        if not hasattr(fastckpt, "save"):
            raise NotImplementedError("this version has no save")
        import torch

        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else folder
        self.target = os.path.join(where, f"fastckpt-bench-{os.getpid()}.pt")
        self.object = torch.load(path_of(folder, tensors, "zip"))
        save = torch.save if writer == "torch.save" else fastckpt.save
        self.prepare(lambda obj: save(obj, self.target), {"weight": torch.ones(4)})
        os.unlink(self.target)

    def time_save(self, folder, writer, tensors):
        self.measure(self.object)

    def teardown(self, *_):
        if os.path.exists(getattr(self, "target", "")):
            os.unlink(self.target)
