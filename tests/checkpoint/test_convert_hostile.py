"""`dsjob convert --to hf` of somebody else's checkpoint: no code runs, nothing is requested, and it ends soon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hostile import HARMFUL, HARMLESS, LORA_CONFIG
from plain_checkpoint import commit_manifest, floats, save
from programs import run_program

from dsjob.checkpoint.pretrained import apart, architecture
from dsjob.checkpoint.pretrained.adapter_config import require_known
from dsjob.checkpoint.pretrained.adapters import Adapter
from dsjob.cli import main
from dsjob.errors import UsageError

pytestmark = pytest.mark.usefixtures("forked_builds")

BASE = "base_model.model.layers.0.q_proj"
LORA_NAMES = {f"{BASE}.base_layer.weight": (8, 6), f"{BASE}.lora_A.a.weight": (2, 6), f"{BASE}.lora_B.a.weight": (8, 2)}
LORA = {**LORA_CONFIG, "target_modules": ["q_proj"]}


def make(root: Path, pretrained: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A checkpoint with these configurations, and tensors of these shapes."""
    folder = save(root, {f"model.{name}": floats(*shape) for name, shape in (shapes or {"w": (2,)}).items()}, world=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "pretrained": pretrained}))
    commit_manifest(root, folder, "step-00000120", 120)
    return root


def refuse(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What the command says of a checkpoint that it refuses."""
    out = root.parent / "out"
    assert main(["convert", "--to", "hf", str(root), str(out), *more]) == 2
    assert not out.exists()
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("\n") <= 3
    assert len(said) < 3000
    return said


# --- what a configuration asks for ---


@pytest.mark.parametrize("place", HARMFUL)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "adapters"])
def test_what_the_files_of_a_model_may_not_ask_for_a_checkpoint_may_not(
    place: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: dict[str, Any] = {"config.json": HARMLESS}
    if file == "adapters":
        kept["adapters"] = {"a": {**LORA, **HARMFUL[place]}}
    else:
        kept[file] = {**HARMLESS, **HARMFUL[place]}
    said = refuse(make(tmp_path / "c", kept, LORA_NAMES if file == "adapters" else None), capsys)
    assert f"{'adapter_config.json of a' if file == 'adapters' else file}: {place}: " in said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "evil/repo"}, "of type 'PROMPT_TUNING'"),
        ({"peft_type": "SHADOW"}, "of type 'SHADOW'"),
        ({"peft_type": ["LORA"]}, "of type ['LORA']"),
        ({"megatron_config": {"a": 1}}, "adapter's megatron_config is"),
        ({"tokenizer_name_or_path": "evil/repo"}, "has an unknown key for LORA: 'tokenizer_name_or_path'"),
        ({"runtime_config": {"ephemeral_gpu_offload": True}}, "unknown key for LORA: 'runtime_config'"),
        ({"feedforward_modules": ["x"]}, "has an unknown key for LORA: 'feedforward_modules'"),
        ({"corda_config": {"a": {"deep": 1}}}, "adapter's corda_config is"),
        ({"lora_alpha": "x"}, "adapter's lora_alpha is 'x'"),
        ({"lora_alpha": 1e300}, "adapter's lora_alpha is 1e+300"),
        ({"lora_alpha": True}, "adapter's lora_alpha is True"),
        ({"lora_alpha": 10**400}, "adapter's lora_alpha is"),
        ({"r": 10**9}, "adapter's r is 1000000000"),
        ({"r": "8"}, "adapter's r is '8'"),
        ({"rank_pattern": {"q_proj": 10**9}}, "adapter's rank_pattern is"),
        ({"rank_pattern": {"([a-z]+)+X": 8}}, "adapter's rank_pattern is"),
        ({"alpha_pattern": {"(": 8}}, "adapter's alpha_pattern is"),
        ({"alpha_pattern": {"q_proj": "x"}}, "adapter's alpha_pattern is"),
        ({"alpha_pattern": [1]}, "adapter's alpha_pattern is"),
        ({"target_modules": "([a-z.0-9_]+)+X"}, "adapter's target_modules is"),
        ({"target_modules": "(a|a)" * 20 + "b"}, "adapter's target_modules is"),
        ({"target_modules": "("}, "adapter's target_modules is"),
        ({"target_modules": ".*a.*b.*c.*d"}, "adapter's target_modules is"),
        ({"target_modules": {"a": 1}}, "adapter's target_modules is"),
        ({"target_modules": ["a"] * 10_001}, "adapter's target_modules is"),
        ({"base_model_name_or_path": "x" * 2000}, "adapter's base_model_name_or_path is"),
        ({"use_rslora": 3}, "adapter's use_rslora is 3"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("more", [(), ("--merge",)], ids=["written", "merged"])
def test_keys_and_values_that_no_adapter_has(
    changes: dict[str, Any], told: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_known(
        {**LORA, "target_modules": rf".*layers\.(?:{'|'.join(map(str, range(80)))})\.(?:mlp|attn)\.(q|v)_proj$"}
    )
    kept = {"config.json": HARMLESS, "adapters": {"a": {**LORA, **changes}}}
    assert told in refuse(make(tmp_path / "c", kept, LORA_NAMES), capsys, *more)
    if "peft_type" not in changes:
        kept["adapters"]["a"] = {**LORA, **dict.fromkeys(changes)}  # known to a later peft, and not used
        require_known(kept["adapters"]["a"])


def test_every_key_that_the_installed_peft_writes_is_known() -> None:
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    from dsjob.checkpoint.pretrained.adapter_config import _OF_KIND
    from dsjob.checkpoint.pretrained.adapters import _plain

    for kind in _OF_KIND:
        more = {"total_step": 10} if kind == "ADALORA" else {}
        config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](target_modules=["q_proj"], **more)
        require_known(json.loads(json.dumps(config.to_dict(), default=_plain)))


@pytest.mark.parametrize("shapes", [(0, 6), (2,), (), (3, 6)], ids=str)
@pytest.mark.parametrize("place", ["lora_A", "lora_B", "base_layer"])
def test_shapes_that_no_adapter_has(
    shapes: tuple[int, ...], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: shapes if place in name else shape for name, shape in LORA_NAMES.items()}
    kept = {"config.json": {"model_type": "own"}, "adapters": {"a": LORA}}
    assert "cannot merge" in refuse(make(tmp_path / "c", kept, names), capsys, "--merge")


def test_tensors_of_an_adapter_that_share_their_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them are held in memory while they are merged."""
    kept = {"config.json": {"model_type": "own"}, "adapters": {"a": LORA}}
    root = make(tmp_path / "c", kept, LORA_NAMES)
    (path,) = root.glob("step-*/manifest.json")
    manifest = json.loads(path.read_text())
    entry = manifest["tensors"][f"model.{BASE}.lora_A.a.weight"]
    manifest["tensors"] |= {f"model.{BASE}{number}.lora_A.a.weight": entry for number in range(50)}
    path.write_text(json.dumps(manifest))
    commit_manifest(root, path.parent, "step-00000120", 120)
    assert main(["convert", "--to", "hf", "--merge", str(root), str(tmp_path / "out")]) not in (0, 2)
    assert "more than all shards together: tensors share bytes" in capsys.readouterr().err


def test_a_module_that_peft_would_import_is_not_written() -> None:
    def origin(library: str) -> Any:
        config = {**LORA, "auto_mapping": {"base_model_class": "x", "parent_library": library}}
        return json.loads(Adapter("a", config).to_json())["auto_mapping"]

    assert origin("transformers.models.llama.modeling_llama")["base_model_class"] == "x"
    assert origin("antigravity") is origin("transformers_evil") is None


@pytest.mark.parametrize("kept", ["deep", "wide", "adapter"])
def test_a_configuration_that_is_too_large_to_be_checked(
    kept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = {"a": deep}
    value = {"config.json": {**HARMLESS, "x": deep if kept == "deep" else [0] * 1_000_001}}
    if kept == "adapter":
        value = {"config.json": HARMLESS, "adapters": {"a": {**LORA, "auto_mapping": deep}}}
    said = refuse(make(tmp_path / "c", value, LORA_NAMES if kept == "adapter" else None), capsys)
    assert ("has more than 50 levels" if kept != "wide" else "has more than 1,000,000 values") in said


def test_a_name_that_patterns_would_take_for_ever_to_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make(tmp_path / "c", {"config.json": HARMLESS}, {"x" * 2000: (2,)})
    assert "has a name of 2,000 characters" in refuse(root, capsys)


# --- what it takes to build it ---


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to a server that stands for the hub, which the environment names."""
    seen: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            seen.append(self.path)
            self.send_error(404)

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield seen
    server.shutdown()


@pytest.mark.full("switch-True", "hook-True")
@pytest.mark.parametrize(("held_by", "anew"), [("switch", False), ("switch", True), ("hook", True)])
def test_nothing_is_requested(
    held_by: str,
    anew: bool,
    tmp_path: Path,
    requests: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A backbone is looked up by transformers. The client's own switch keeps it from that; without the switch, the
    process has no network either. In a new interpreter, the environment with the hub counts before the imports."""
    if anew:
        monkeypatch.setattr(apart, "subprocess", subprocess)
    if held_by == "hook":
        monkeypatch.setattr(apart, "_OFFLINE", {})
    config = {"architectures": ["UperNetForSemanticSegmentation"], "model_type": "upernet", "backbone": "x/y"}
    root = make(tmp_path / "c", {"config.json": config})
    assert main(["convert", "--to", "hf", str(root), str(tmp_path / "out")]) == 0
    assert "UperNetForSemanticSegmentation cannot be built on the meta device" in caplog.text
    assert ("socket.getaddrinfo is not allowed" in caplog.text) == (held_by == "hook")
    assert requests == []


@pytest.mark.parametrize(
    "act",
    [
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.socket().connect(('127.0.0.1', 9))",
        "socket.socket().bind(('127.0.0.1', 0))",
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
        "socket.gethostbyname('localhost')",
        "os.fork() or os._exit(0)",
        "os.posix_spawn(sys.executable, [sys.executable], {})",
        "multiprocessing.get_context('fork').Process().start()",
    ],
)
def test_the_process_reaches_no_network_and_starts_no_other(act: str, tmp_path: Path) -> None:
    program = "import multiprocessing.popen_fork, os, socket, sys; from dsjob.checkpoint.pretrained import apart"
    program += f"; sys.addaudithook(apart._refuse); {act}"
    done = run_program([sys.executable, "-c", program], cwd=tmp_path)
    assert done.returncode == 1
    assert "is not allowed while building a model from a configuration" in done.stderr


SWIN = {"architectures": ["SwinModel"], "model_type": "swin"}
LLAMA = {"architectures": ["LlamaModel"], "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "config",
    [{**SWIN, "depths": [10**5]}, {**LLAMA, "num_hidden_layers": 10**7}],
    ids=["depths", "layers"],
)
def test_a_small_manifest_builds_no_giant(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refuse(make(tmp_path / "c", {"config.json": config}), capsys)
    assert "a model with more than 10,064 modules and parameters, but the checkpoint has 1 tensors" in said


@pytest.mark.parametrize(("seconds", "memory", "told"), [(1, 64 << 30, "1 s of CPU time"), (60, 1 << 28, "256 MiB")])
@pytest.mark.full("60-268435456-256 MiB")
def test_what_no_count_of_modules_bounds(
    seconds: int,
    memory: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A name for each of a thousand million labels."""
    monkeypatch.setattr(apart, "_SECONDS", seconds)
    monkeypatch.setattr(apart, "_MEMORY", memory)
    config = {**LLAMA, "num_hidden_layers": 1, "num_labels": 10**9}
    assert told in refuse(make(tmp_path / "c", {"config.json": config}), capsys)


def test_an_adapter_saved_alone_over_a_large_model_is_within_the_bounds() -> None:
    """That has the most modules for each tensor: its base model is built as well. More than the bound is refused."""
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 126, "vocab_size": 40}
    names = {f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.a.weight": (2, 8) for n in range(126)}
    question = {"config": config, "shapes": names, "adapters": [("a", LORA)], "modules": []}
    with pytest.raises(UsageError, match="does not match"):  # which is found after it was built
        architecture.answer(question)
    with pytest.raises(UsageError, match="more than 18,064 modules"):
        architecture.answer({**question, "config": {**config, "num_hidden_layers": 2000}})
