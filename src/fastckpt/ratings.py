"""What to think of a name that a pickle gives: known to be plain data, dangerous for a reason, or unknown.

Names are compared as text. Nothing is imported to find out what they are.
"""

import _compat_pickle

from .rebuild import TABLE

KNOWN, UNKNOWN, DANGEROUS = "known", "unknown", "dangerous"

# Classes that torch.load(weights_only=True) takes too, once torch.distributed.tensor or torch.nested is imported.
TORCH_ACCEPTS = frozenset(
    (module, name)
    for module, names in {
        "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
        "torch.distributed.device_mesh": "DeviceMesh",
        "torch.distributed.tensor": "DTensor",
        "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
        "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
        "torch.nested._internal.nested_tensor": "NestedTensor _rebuild_njt",
    }.items()
    for name in names.split()
)

# Reason -> modules of which every name is dangerous, those of submodules too.
MODULES = {
    "starts programs": """
        os posix nt subprocess _posixsubprocess _winapi pty popen2 commands multiprocessing _multiprocessing asyncio
        concurrent.futures.process distutils setuptools sh pexpect fabric invoke psutil _aix_support _osx_support
        torch.utils.cpp_extension torch.utils.collect_env torch.distributed.launcher torch.distributed.run
        torch.distributed.elastic torch._inductor.codecache torch.utils.bottleneck numpy.distutils numpy.f2py""",
    "runs code": """
        code codeop runpy timeit bdb pdb trace cProfile profile doctest pydoc cgitb idlelib lib2to3 test IPython
        ipykernel nose pytest _pytest numpy.testing torch.package torch._dynamo torch._inductor torch.fx.graph_module
        torch.testing logging.config jinja2 mako ast symtable numexpr _testcapi _testinternalcapi _xxsubinterpreters
        _interpreters readline rlcompleter""",
    "compiles code": "marshal _marshal py_compile compileall cffi numba cython Cython",
    "imports modules": """
        importlib imp _imp _frozen_importlib _frozen_importlib_external pkgutil zipimport pkg_resources modulefinder site
        sitecustomize torch.hub torch._classes torch._ops""",
    "reaches into the interpreter": "sys gc inspect ctypes _ctypes _thread threading signal atexit faulthandler tracemalloc",
    "opens connections": """
        socket _socket socketserver ssl _ssl select http httplib urllib urllib2 urllib3 requests httpx aiohttp ftplib
        smtplib poplib imaplib nntplib telnetlib xmlrpc webbrowser antigravity paramiko websocket websockets
        torch.distributed.rpc""",
    "touches files": """
        shutil tempfile fileinput glob mmap _io io tarfile zipfile gzip bz2 lzma sqlite3 _sqlite3 dbm linecache
        _pyio dircache posixpath ntpath genericpath""",
    "reads a pickle without checks": """
        pickle _pickle cPickle pickletools shelve cloudpickle dill joblib jsonpickle
        torch.serialization torch.jit yaml""",
    "installs packages": "pip ensurepip venv virtualenv conda uv",
}

# Of these the name itself is dangerous, and not what lies below it: packages of people's own are called so, too.
PLAIN_WORDS = frozenset(
    "code test trace site glob profile http select ast sh yaml invoke fabric mako uv".split()
)

# Reason -> names that are dangerous in modules that are not.
NAMES = {
    "runs code": """
        builtins.eval builtins.exec builtins.execfile builtins.breakpoint builtins.__build_class__ types.CodeType
        types.FunctionType types.LambdaType types.ModuleType pandas.eval pandas.core.computation.eval.eval
        torch.utils._config_module.load_config torch.jit.unsupported_tensor_ops.execWrapper uuid._get_command_stdout
        platform.popen platform._syscmd_file _pyrepl.pager.pipe_pager dataclasses._create_fn typing.get_type_hints
        typing._eval_type test.support.script_helper.assert_python_ok""",
    "compiles code": "builtins.compile re.sre_compile",
    "imports modules": "builtins.__import__ builtins.reload builtins.__loader__ torch._utils._import_dotted_name",
    "reaches into the interpreter": """
        builtins.getattr builtins.setattr builtins.delattr builtins.globals builtins.locals builtins.vars builtins.dir
        builtins.super builtins.help builtins.exit builtins.quit types.MethodType types.BuiltinFunctionType
        weakref.finalize copyreg.add_extension copyreg.pickle""",
    "calls what it is given": """
        functools.partial functools.partialmethod functools.reduce _functools.partial _functools.reduce
        operator.attrgetter operator.methodcaller operator.itemgetter operator.call _operator.attrgetter
        _operator.methodcaller _operator.itemgetter _operator.call builtins.map builtins.filter builtins.apply
        builtins.property builtins.classmethod builtins.staticmethod builtins.sorted builtins.iter itertools.starmap
        itertools.accumulate itertools.groupby contextlib.ExitStack sched.scheduler
        concurrent.futures.ThreadPoolExecutor numpy.vectorize numpy.frompyfunc numpy.fromfunction
        numpy.apply_along_axis""",
    "touches files": """
        builtins.open builtins.file builtins.input builtins.raw_input codecs.open numpy.fromfile numpy.memmap
        numpy.save numpy.savetxt numpy.loadtxt numpy.genfromtxt numpy.DataSource torch.from_file torch.save
        pandas.read_csv""",
    "reads a pickle without checks": """
        torch.load torch.storage._load_from_bytes numpy.load numpy.lib.npyio.load numpy.lib.npyio.NpzFile
        numpy.lib.format.read_array pandas.read_pickle pandas.io.pickle.read_pickle""",
}

_MODULES = {module: reason for reason, modules in MODULES.items() for module in modules.split()}
_NAMES = {name: reason for reason, names in NAMES.items() for name in names.split()}


def rate(module, name):
    """Rate a name that a pickle gives: (KNOWN, UNKNOWN or DANGEROUS, the reason in a few words or "")."""
    if (module, name) in TABLE:
        return KNOWN, ""
    if (module, name) in TORCH_ACCEPTS:
        return KNOWN, "accepted by torch"
    reason = _reason(module, name)
    if reason is None:  # what an unpickler makes of a name of Python 2
        today = _compat_pickle.NAME_MAPPING.get((module, name))
        renamed = _compat_pickle.IMPORT_MAPPING.get(module)
        if today is not None:
            reason = _reason(*today)
        elif renamed is not None:
            reason = _reason(renamed, name)
    return (UNKNOWN, "") if reason is None else (DANGEROUS, reason)


def _reason(module, name):
    """Why a name is dangerous, or None. A dotted name is a walk over attributes, which may leave the module it begins in."""
    steps = _steps(name)
    found = _module_reason(module) or _NAMES.get(f"{module}.{steps[0]}")
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if found:
            return found
        if step.startswith("__") and step.endswith("__"):
            return "reaches into the interpreter"
        if following is not None:  # modules import others as _os, too
            found = _MODULES.get(step) or _MODULES.get(step.lstrip("_"))
        elif step not in PLAIN_WORDS:
            found = _MODULES.get(step)
        found = found or _NAMES.get(f"{step}.{following}")
    return found


def _module_reason(module):
    """Why a module is dangerous, by its own name or that of a package it lies in."""
    if module in _MODULES:
        return _MODULES[module]
    end = module.rfind(".", 0, MOST_MODULE)
    while end > 0:
        package = module[:end]
        if package in _MODULES and package not in PLAIN_WORDS:
            return _MODULES[package]
        end = module.rfind(".", 0, end)
    return None


# No honest name is longer; of a longer one both ends are looked at.
MOST_MODULE = 500
MOST_STEPS = 32


def _steps(name):
    """The attributes of a dotted name, in order."""
    steps = name.split(".", MOST_STEPS)
    if len(steps) <= MOST_STEPS:
        return steps
    return steps[:MOST_STEPS] + name.rsplit(".", MOST_STEPS)[1:]
