"""`dsjob exec` on real ranks: what a program finds, what is recorded, and who is blamed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from executed import TRAIN, UNUSED, execute, read_result, wait_for
from jobs import dsjob, read_metrics
from programs import DSJOB, Program

from dsjob import list_runs, provenance
from dsjob.errors import UsageError
from dsjob.programs.alias import STAND_IN
from dsjob.programs.launch import require_engine


def test_a_program_trains_on_two_ranks_and_leaves_a_run_folder(folder: Path) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--steps", "2", API_TOKEN="hunter22", NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stderr
    assert "dsjob exec: train.py on 2 ranks, run folder run\n" in done.stderr
    assert UNUSED not in done.stderr
    own = [line.split() for line in done.stdout.splitlines()]
    assert [words[:4] for words in own] == [["rank", "0", "step", step] for step in "0011"]
    assert "rank 1 step 1 " in (folder / "run/logs/rank-00001.log").read_text()

    means = [(float(own[at][4]) + float(own[at + 1][4])) / 2 for at in (0, 2)]
    assert read_metrics(folder / "run") == {1: pytest.approx(means[0]), 2: pytest.approx(means[1])}
    assert read_metrics(folder / "run", "lr") == {1: 0.1, 2: 0.1}
    assert all(norm > 0 for norm in read_metrics(folder / "run", "grad_norm").values())
    assert json.loads((folder / "run/deepspeed.json").read_text())["train_batch_size"] == 8
    about = json.loads((folder / "run/program.json").read_text())
    assert about["command"] == ["train.py", "--steps", "2"]
    environment = provenance.read(str(folder / "run"))
    assert [environment["variables"][name] for name in ("API_TOKEN", "NCCL_DEBUG")] == ["***", "WARN"]
    assert read_result(folder)["status"] == "done"
    assert [(run.name, run.status, run.step) for run in list_runs(str(folder))] == [("train", "done", 2)]


LOOK = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
found = {
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
    "heavy": sorted({"torch", "transformers", "dsjob.deepspeed"} & set(sys.modules)),
    "private": [name for name in os.environ if name.startswith("DSJOB_")],
    "environment": {name: os.environ.get(name) for name in names},
}
print(json.dumps(found))
"""


def test_a_program_finds_what_python_and_the_launcher_give_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/look.py").write_text(LOOK)
    words = ("--master_port", "29876", "package/look.py", "--num_gpus", "2", "--debug")
    found = json.loads(execute_new(tmp_path, *words))
    path = str(tmp_path / "package/look.py")
    assert found["argv"] == ["package/look.py", "--local_rank=0", "--num_gpus", "2", "--debug"]
    assert (found["path"], found["file"], found["name"]) == (str(tmp_path / "package"), path, "__main__")
    assert found["heavy"] == []
    assert found["environment"] == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29876",
    }  # fmt: skip
    found = json.loads(execute_new(tmp_path, "--no_local_rank", "-m", "package.look", "x"))
    assert (found["argv"], found["path"], found["file"]) == ([path, "x"], str(tmp_path), path)


def execute_new(folder: Path, *words: str) -> str:
    done = dsjob("exec", *words, cwd=folder, fresh=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_processes_that_it_spawns_import_its_main_module_and_exit_handlers_run(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(
        "import atexit, multiprocessing, sys\n"
        "class Name: text = 'from main'\n"
        "def work(queue): queue.put((__name__, Name.text))\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(lambda: print(sys.modules['__main__'].Name.text))\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=work, args=(queue,))\n"
        "    process.start()\n"
        "    print(queue.get())\n"
    )
    for words in (["spawn.py"], ["-m", "spawn"]):
        assert execute_new(tmp_path, *words) == "('__mp_main__', 'from main')\nfrom main\n"


def test_any_command_runs_as_it_is_with_the_environment_of_a_rank(tmp_path: Path) -> None:
    script = 'echo $RANK/$WORLD_SIZE $@ >> told; test -n "$PYTHONPATH"'
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "run.sh").chmod(0o755)
    done = execute(tmp_path, "--nproc", "2", "--no_python", "./run.sh", "a")
    assert done.returncode == 0, done.stderr
    told = sorted((tmp_path / "told").read_text().splitlines())
    assert told == ["0/2 --local_rank=0 a", "1/2 --local_rank=1 a"]


def test_a_command_that_the_system_cannot_run_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo no first line\n")
    (tmp_path / "run.sh").chmod(0o755)
    done = execute(tmp_path, "--no_python", "./run.sh")
    assert done.returncode == 2
    message = "dsjob: error: cannot run ./run.sh: Exec format error\n  a script begins with a line such as #!/bin/sh\n"
    assert done.stderr.endswith(message)
    assert "Traceback" not in done.stderr


FORK = """
import deepspeed, os, sys, torch
engine, *_ = deepspeed.initialize(
    model=torch.nn.Linear(4, 1),
    config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
)
for step in range(3):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
child = os.fork()
if child == 0:
    DO
assert os.waitpid(child, 0)[1] == CODE << 8
assert os.path.exists("run/running")
print("goes on")
"""


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("do", "code"), [("sys.exit(3)", 3), ("raise ValueError('boom')", 1)], ids=["exit", "raise"])
@pytest.mark.full
def test_a_fork_that_comes_to_its_end_is_not_the_end_of_the_rank(
    tmp_path: Path, do: str, code: int, launched: bool
) -> None:
    (tmp_path / "train.py").write_text(FORK.replace("DO", do).replace("CODE", str(code)))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} if launched else {}
    # A fork of a test's fork would not end as one of a new interpreter does.
    done = dsjob("exec", "--run-dir", "run", "train.py", cwd=tmp_path, fresh=True, **place)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
    assert ("a process forked by rank 0: ValueError: boom" in done.stderr) == (code == 1)
    assert "Bad file descriptor" not in done.stderr
    assert list(read_metrics(tmp_path / "run")) == [1, 2, 3]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3
    assert read_result(tmp_path)["status"] == "done"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_rank_that_raises_is_blamed_with_its_own_traceback_once(folder: Path, rank: str) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--at", rank, "--do", "raise")
    assert done.returncode == 1
    assert f"dsjob: error: rank {rank}: ValueError: boom (" in done.stderr
    assert done.stderr.count("Traceback") == 1
    frames = [line.split(", ")[-1] for line in done.stderr.splitlines() if line.startswith("    File ")]
    assert frames == ["in <module>", "in fail"]
    assert read_result(folder)["status"] == "failed"


def test_an_error_of_dsjob_comes_without_a_traceback_and_a_bug_without_its_frames(folder: Path) -> None:
    done = execute(folder, "train.py", "--at", "0", "--do", "config")
    assert done.returncode == 2
    assert "train_batch_sizee: unknown key" in done.stderr
    assert "Traceback" not in done.stderr
    done = execute(folder, "train.py", "--at", "0", "--do", "engine")
    assert "the loss must be a scalar tensor" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"called at {folder}/train.py:26 in fail" in done.stderr


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import deepspeed; deepspeed.init_inference()", "init_inference"),
        ("from deepspeed import InferenceEngine", "InferenceEngine"),
        ("import deepspeed.moe.layer", "moe.layer"),
    ],
)
def test_a_name_that_dsjob_lacks_is_one_error_with_the_line_of_the_program(
    tmp_path: Path, statement: str, name: str
) -> None:
    (tmp_path / "train.py").write_text(f"def work():\n    {statement}\nwork()\n")
    done = execute(tmp_path, "train.py")
    _, message, place = done.stderr.splitlines()
    assert message.startswith(f"dsjob: error: dsjob has no deepspeed.{name}: ")
    assert place == f"  called at {tmp_path}/train.py:2 in work"


def test_lenient_leaves_unknown_keys_out_with_a_warning(tmp_path: Path) -> None:
    many = {f"key{number}": 0 for number in range(60)}
    config = {"train_batch_size": 2, "stepz": 1, "zero_optimization": {"stage": 1, "overlap": 1, **many}}
    text = f"import deepspeed, torch\nengine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config={config})"
    (tmp_path / "train.py").write_text(f"{text}\nprint(engine.zero_optimization_stage())")
    assert execute(tmp_path, "train.py").returncode == 2
    done = execute(tmp_path, "--lenient", "train.py")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    for key in ("stepz", "zero_optimization.overlap"):
        assert done.stderr.count(f"dsjob: train.py:2: warning[unknown-key]: {key}: unknown key, left out") == 1


def test_a_run_folder_that_cannot_be_made_is_an_error_that_names_the_flag(folder: Path) -> None:
    done = dsjob("exec", "--run-dir", "train.py/run", "train.py", cwd=folder)
    assert (done.returncode, "choose another folder with --run-dir" in done.stderr) == (2, True), done.stderr


def test_exit_codes_pass_through(folder: Path) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--at", "1", "--do", "exit")
    assert done.returncode == 7
    assert "dsjob: error: rank 1 exited with code 7\n" in done.stderr
    assert "last words" in done.stderr


LOSE = """
import shutil, torch, deepspeed
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "steps_per_print": 2}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config=config)
for step in range(5):
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    shutil.rmtree("run", ignore_errors=True)
print(engine.global_steps)
"""


def test_a_program_goes_on_if_nothing_can_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "lose.py").write_text(LOSE)
    done = execute(tmp_path, "--no_local_rank", "lose.py")
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert done.stderr.count("dsjob exec: no more metrics are recorded: cannot write ") == 1
    assert "dsjob exec: cannot write run/result.json: no such file or folder" in done.stderr


@pytest.mark.parametrize("words", [["leave.py"], ["--no_python", "--no_local_rank", "sh", "-c", "exit 75"]])
def test_the_exit_code_of_a_saved_program_passes_through_too(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "leave.py").write_text("import os, sys; sys.exit(75 if os.environ['RANK'] == '1' else 0)")
    done = execute(tmp_path, "--num_gpus", "2", *words)
    assert done.returncode == 75
    assert [run.status for run in list_runs(str(tmp_path))] == ["stopped"]


def test_a_folder_that_is_run_gives_the_run_its_name(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("print('here')")
    done = dsjob("exec", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "here\n"), done.stderr
    assert (tmp_path / "outputs" / tmp_path.name).is_dir()


def test_a_rank_that_ends_too_early_is_named(folder: Path) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--at", "1", "--do", "leave")
    assert done.returncode == 1
    assert "dsjob: error: rank 1 has ended with exit code 0, but rank 0 waits for it" in done.stderr
    assert "all ranks must call the model, and its state_dict(), together" in done.stderr


def test_a_killed_rank_is_named(folder: Path) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--at", "1", "--do", "kill")
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr


@pytest.mark.full
def test_a_rank_that_hangs_is_named_with_its_place(folder: Path) -> None:
    done = execute(folder, "--num_gpus", "2", "train.py", "--at", "0", "--do", "hang", DEEPSPEED_TIMEOUT="0.05")
    assert done.returncode == 1
    assert "rank 0 has stalled in step 2 (training), at " in done.stderr
    assert f"{folder}/train.py:28 in fail" in done.stderr
    assert "runpy" not in done.stderr


STOP = """
import os, signal, sys, time
if "save" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open("ready" + os.environ["RANK"], "w")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "word", "code"), [(signal.SIGTERM, "", 143), (signal.SIGINT, "", 130), (signal.SIGTERM, "save", 0)]
)
def test_signals_reach_the_program(tmp_path: Path, number: int, word: str, code: int) -> None:
    (tmp_path / "stop.py").write_text(STOP)
    program = Program([DSJOB, "exec", "--num_gpus", "2", "stop.py", word], cwd=tmp_path)
    wait_for(tmp_path, "ready0", "ready1")
    os.kill(program.pid, number)
    _, stderr = program.communicate()
    assert program.returncode == code, stderr
    assert "Traceback" not in stderr


SAVING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open("ready0", "w")
time.sleep(60)
"""


def test_a_signal_passes_the_shell_and_reaches_the_program_that_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "saving.py").write_text(SAVING)
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\n{sys.executable} -m dsjob exec saving.py\ncode=$?\nexit $code\n")
    (tmp_path / "run.sh").chmod(0o755)
    program = Program([DSJOB, "exec", "--no_python", "--no_local_rank", "./run.sh"], cwd=tmp_path)
    wait_for(tmp_path, "ready0")
    os.kill(program.pid, signal.SIGTERM)
    _, stderr = program.communicate()
    assert program.returncode == 75, stderr
    assert sorted((run.name, run.status) for run in list_runs(str(tmp_path))) == [
        ("run.sh", "stopped"),
        ("saving", "stopped"),
    ]


def test_a_program_that_imports_dsjobs_own_module_is_recorded_too(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN.replace("import deepspeed", "import dsjob.deepspeed as deepspeed"))
    done = execute(folder, "train.py", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert UNUSED not in done.stderr
    assert list(read_metrics(folder / "run")) == [1]


def test_the_real_deepspeed_runs_without_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "which.py").write_text("import importlib.util as u; print(u.find_spec('deepspeed').origin)")
    (tmp_path / "deepspeed.py").touch()
    # A program that dsjob runs may start one that it does not.
    for found in (str(tmp_path), f"{STAND_IN}:{tmp_path}"):
        done = dsjob("exec", "--engine", "deepspeed", "which.py", cwd=tmp_path, fresh=True, PYTHONPATH=found)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path}/deepspeed.py\n"), done.stderr


def test_an_engine_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_engine("dsjob")
    (tmp_path / "deepspeed").mkdir()  # a folder without __init__.py, such as one with configs, is no package
    monkeypatch.setattr(sys, "path", [STAND_IN, str(tmp_path)])
    with pytest.raises(UsageError, match="--engine deepspeed needs the package deepspeed, which is not installed"):
        require_engine("deepspeed")
    (tmp_path / "deepspeed" / "__init__.py").touch()
    importlib.invalidate_caches()
    require_engine("deepspeed")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hostfile", "hosts", "train.py"], "ranks on several machines are started with torchrun"),
        (["--num_nodes", "2", "train.py"], "ranks on several machines are started with torchrun"),
        (["--include", "a:0@b:1", "train.py"], "start those of several with torchrun"),
        (["--include", "localhost:0", "--num_gpus", "1", "train.py"], "--num_gpus excludes --include"),
        (["--include", "localhost:0", "train.py"], "--include names GPUs, but this machine has none"),
        (["missing.py"], "missing.py does not exist"),
        (["python_train.py"], "give the path of a Python file"),
        (["--num_gpu", "2", "train.py"], 'did you mean "--num_gpus"?'),
        (["python", "train.py"], "leave out the interpreter: dsjob exec train.py"),
        (["missing"], "a module needs -m: dsjob exec -m missing"),
        (["cfg.yaml"], "run a job: dsjob cfg.yaml"),
        (["."], "the folder . has no __main__.py to run"),
        (["-m", "missing.module"], "No module named 'missing'"),
        (["-m", "json"], "there is no module json to run"),
        (["--no_python", "no-such-command"], "there is no such command"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_do(folder: Path, words: list[str], expected: str) -> None:
    done = execute(folder, *words)
    assert done.returncode in (1, 2)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr or words[0] == "-m"


def test_a_launcher_flag_after_the_program_is_reported(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("import sys\nprint(sys.argv[-2:])")
    done = execute(tmp_path, "ok.py", "--num_gpus", "2")
    assert (done.returncode, done.stdout) == (0, "['--num_gpus', '2']\n"), done.stderr
    assert "--num_gpus comes after ok.py, so the program gets it" in done.stderr
    assert "comes after" not in execute(tmp_path, "--num_gpus", "1", "ok.py", "--num_gpus", "2").stderr


def test_flags_that_mean_this_machine_alone_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('ok')")
    done = execute(tmp_path, "--num_nodes", "1", "--node_rank", "0", "ok.py")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_program_that_does_not_use_dsjob_is_told_so_once(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import os, sys\nsys.exit(int(os.environ.get('CODE', 0)))")
    assert execute(tmp_path, "--num_gpus", "2", "idle.py").stderr.count(UNUSED) == 1
    assert UNUSED not in execute(tmp_path, "idle.py", CODE="3").stderr
    assert UNUSED not in execute(tmp_path, "--engine", "deepspeed", "idle.py").stderr
