"""What the user grants on the command line and in a config file of their own, and what the place of a document does."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from jobs import dsjob, make_job
from programs import DSJOB, clean_env, run_program

from dsjob.errors import DocumentError, UsageError
from dsjob.trust.grant import Trust
from dsjob.trust.user import Granted, comes_from_elsewhere, read_config, read_prefixes

REFUSED = "my_model.build is not trusted: the document comes from elsewhere (a URL, a checkpoint"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return make_job(tmp_path)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A job whose model is in a package that is installed (on PYTHONPATH), not in its folder."""
    job, site = tmp_path / "job", tmp_path / "site"
    job.mkdir()
    site.mkdir()
    make_job(job, model={"_target_": "vendor_model.build"})
    (site / "vendor_model.py").write_text((job / "my_model.py").read_text())
    return job


def test_the_flag_reaches_the_run_its_ranks_its_sweep_and_those_of_torchrun(installed: Path) -> None:
    site = str(installed.parent / "site")
    refused = dsjob("cfg.json", cwd=installed, PYTHONPATH=site)
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "cfg.json:3:5: error[untrusted-target]: model._target_: vendor_model.build is not trusted: vendor_model is an"
    )
    assert "run with --trust vendor_model.build" in refused.stderr
    assert not (installed / "run").exists()
    granted = dsjob("cfg.json", "--trust", "vendor_model", cwd=installed, PYTHONPATH=site)
    assert granted.returncode == 0, granted.stderr
    on_ranks = ("--trust=vendor_model", "launch.nproc=2", "output.dir=ranks")
    ranks = dsjob("cfg.json", *on_ranks, cwd=installed, PYTHONPATH=site)
    assert ranks.returncode == 0, ranks.stderr
    given = ("--trust", "vendor_model.build", "trainer.seed=1,2")
    sweep = dsjob("-m", "cfg.json", *given, cwd=installed, PYTHONPATH=site)
    assert sweep.returncode == 0, sweep.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", DSJOB, "cfg.json"]
    for flags, code in ((["--trust", "vendor_model"], True), ([], False)):
        command = [*torchrun, *flags, f"output.dir=joined{code}"]
        done = run_program(command, cwd=installed, env=clean_env(PYTHONPATH=site))
        assert (done.returncode == 0) is code, done.stderr


@pytest.mark.full
def test_the_flag_reaches_a_run_in_a_new_interpreter(installed: Path) -> None:
    """It has loaded less, and what is trusted depends on that."""
    site = str(installed.parent / "site")
    granted = dsjob("cfg.json", "--trust", "vendor_model", cwd=installed, fresh=True, PYTHONPATH=site)
    assert granted.returncode == 0, granted.stderr


def test_the_document_and_the_environment_grant_nothing(installed: Path) -> None:
    site = str(installed.parent / "site")
    grants = {"DSJOB_TRUST": '{"prefixes": ["vendor_model"], "folders": [], "local": true}', "PYTHONPATH": site}
    assert dsjob("cfg.json", cwd=installed, **grants).returncode == 2
    document = json.loads((installed / "cfg.json").read_text()) | {"trust": ["vendor_model"]}
    (installed / "cfg.json").write_text(json.dumps(document))
    assert "trust: unknown key" in dsjob("cfg.json", cwd=installed, PYTHONPATH=site).stderr


def test_validate_fails_where_run_would_refuse_and_shows_the_flag(installed: Path) -> None:
    site = str(installed.parent / "site")
    done = dsjob("validate", "cfg.json", cwd=installed, PYTHONPATH=site)
    assert done.returncode == 2
    assert "cfg.json:3:5: error[untrusted-target]: model._target_: vendor_model.build is not trusted" in done.stderr
    assert "--trust vendor_model.build" in done.stderr
    granted = dsjob("validate", "cfg.json", "--trust", "vendor_model.build", cwd=installed, PYTHONPATH=site)
    assert (granted.returncode, granted.stdout) == (0, "cfg.json: ok\n")


def test_an_explicit_grant_is_the_users_own_decision(job: Path) -> None:
    """Also the proof that the hostile documents would do harm, were they let."""
    (job / "cfg.json").write_text(
        (job / "cfg.json").read_text().replace('"my_model.build"', '"os.system", "command": "touch pwned"')
    )
    assert dsjob("cfg.json", cwd=job).returncode == 2
    assert not (job / "pwned").exists()
    done = dsjob("cfg.json", "--trust", "os", cwd=job)
    assert "os.system returned int, not a torch.nn.Module" in done.stderr
    assert (job / "pwned").exists()


def test_runs_of_ones_own_repeat_and_a_document_out_of_a_checkpoint_needs_the_flag(job: Path) -> None:
    assert dsjob("cfg.json", cwd=job).returncode == 0
    assert dsjob("run", "run/resolved.json", "output.dir=again", cwd=job).returncode == 0
    assert dsjob("run", "run", "trainer.max_steps=7", cwd=job).returncode == 0
    (checkpoint,) = (job / "run" / "checkpoints").glob("step-00000006-a*")
    document = f"{checkpoint}/job.json"
    (checkpoint / "my_model.py").write_text("raise SystemExit('imported from the checkpoint')\n")
    refused = dsjob("run", document, "output.dir=third", cwd=job, fresh=True)
    assert refused.returncode == 2
    assert REFUSED in refused.stderr
    granted = dsjob("run", document, "--trust", "my_model", "output.dir=third", cwd=job)
    assert granted.returncode == 0, granted.stderr


@pytest.mark.full("run")
@pytest.mark.parametrize("command", ["run", "plan"])
def test_optional_imports_of_a_document_from_elsewhere_find_nothing_in_the_current_folder(
    job: Path, command: str
) -> None:
    for name in ("triton", "kernels", "peft", "torchvision", "torchaudio"):  # those not installed are looked for there
        (job / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\nraise ImportError\n")
    document = json.loads((job / "cfg.json").read_text())
    document["model"] = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 1}
    document["data"] = {"train": {"_target_": "torch.utils.data.TensorDataset", "_args_": [{"_target_": "torch.ones"}]}}
    document["data"]["train"]["_args_"][0]["_args_"] = [8, 3]
    (job / "out-a0001").mkdir()
    (job / "out-a0001" / "job.json").write_text(json.dumps(document))
    dsjob(command, "out-a0001/job.json", cwd=job, fresh=True)
    assert not (job / "ran").exists()


def test_a_module_that_the_user_names_brings_its_folder_for_a_document_from_elsewhere(job: Path) -> None:
    folders = (str(job / "other"), str(job))
    assert Trust(folders=folders).importable == folders
    assert Trust(folders=folders, local=False).importable == ()
    assert Trust(("torch.compile", "protocol:sftp"), folders, local=False).importable == ()
    assert Trust(("my_model.build",), folders, local=False).importable == (str(job),)


@pytest.mark.parametrize(
    ("path", "elsewhere"),
    [
        ("cfg.json", False),
        ("job.json", False),
        ("run/resolved.json", False),
        ("memory://cfg.json", True),
        ("https://host/cfg.json", True),
        ("file:///cfg.json", True),
        ("checkpoints/step-00000120-a0001/job.json", True),
        ("checkpoints/best-a0001/anything.yaml", True),
        ("held/cfg.json", True),
        ("web/cfg.json", False),
        ("linked.json", True),
    ],
)
def test_where_a_document_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, elsewhere: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "held", "web", "checkpoints/step-00000120-a0001"):
        Path(folder).mkdir(parents=True)
    for name in (
        "run/resolved.json",
        "held/manifest.json",
        "held/state.json",
        "web/manifest.json",
        "checkpoints/step-00000120-a0001/job.json",
    ):
        Path(name).write_text("{}")
    Path("linked.json").symlink_to("checkpoints/step-00000120-a0001/job.json")
    assert comes_from_elsewhere(path) is elsewhere


def test_a_resolved_document_of_another_user_is_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = tmp_path / "resolved.json"
    resolved.write_text("{}")
    assert not comes_from_elsewhere(str(resolved))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(resolved).st_uid + 1)
    assert comes_from_elsewhere(str(resolved))


# ---- the user's config file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "dsjob" / "config.yaml"
    path.parent.mkdir(mode=0o755)
    path.write_text("trust: [vendor_model, a.b]\n")
    path.chmod(0o644)
    return path


def test_the_config_file_grants_what_it_lists(installed: Path, config: Path) -> None:
    assert read_prefixes(str(config)) == ("vendor_model", "a.b")
    env = {"XDG_CONFIG_HOME": str(config.parent.parent), "PYTHONPATH": str(installed.parent / "site")}
    done = dsjob("validate", "cfg.json", cwd=installed, **env)
    assert done.stdout == "cfg.json: ok\n"
    assert dsjob("cfg.json", cwd=installed, **env).returncode == 0


def test_no_file_and_an_empty_one_grant_nothing(config: Path) -> None:
    assert read_prefixes(str(config.parent / "none.yaml")) == ()
    config.write_text("\n")
    assert read_prefixes(str(config)) == ()


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_config_file_that_others_can_write_is_refused(config: Path, mode: int, which: str) -> None:
    place = config if which == "file" else config.parent
    place.chmod(mode if which == "file" else mode | 0o111)
    with pytest.raises(UsageError, match="is writable by others") as caught:
        read_prefixes(str(config))
    assert caught.value.hint == f"chmod go-w {place}"


def test_a_config_file_of_another_user_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(config).st_uid + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        read_prefixes(str(config))


def test_the_config_file_names_variables_that_any_document_may_read(installed: Path, config: Path) -> None:
    config.write_text("environment: [DSJOB_SEEN]\n")
    assert read_config(str(config)) == Granted((), ("DSJOB_SEEN",))
    env = {"XDG_CONFIG_HOME": str(config.parent.parent), "DSJOB_SEEN": "seen"}
    shown = dsjob("show", "cfg.json", "name=${oc.env:DSJOB_SEEN}", cwd=installed, **env)
    assert "name: seen\n" in shown.stdout, shown.stderr
    refused = dsjob("show", "cfg.json", "name=${oc.env:DSJOB_SEEN}", cwd=installed, DSJOB_SEEN="seen")
    assert refused.returncode == 2
    assert "allow it with `environment: [DSJOB_SEEN]` in ~/.config/dsjob/config.yaml" in refused.stderr


@pytest.mark.parametrize("text", ["trust: os", "trust: [1]", "trsut: [a]", "trust: {a: b}", "environment: X"])
def test_a_config_file_that_says_something_else_is_refused(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(UsageError, match="lists of names"):
        read_prefixes(str(config))


def test_a_config_file_that_is_no_text_is_refused(config: Path) -> None:
    config.write_bytes(b"trust: [\xff]\n")
    with pytest.raises(UsageError, match=r"config\.yaml: not UTF-8 text \(byte 8\)"):
        read_prefixes(str(config))
    config.unlink()
    config.mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*config\.yaml: Is a directory"):
        read_prefixes(str(config))


def test_a_config_file_with_a_syntax_error_says_where(config: Path) -> None:
    config.write_text("trust: [a\n")
    with pytest.raises(DocumentError, match=r"config\.yaml:"):
        read_prefixes(str(config))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_modules_beside_another_users_job_file_are_rejected_with_the_reason(job: Path, tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (folder := tmp_path / "theirs").mkdir()
    for name in ("cfg.json", "my_model.py"):
        (job / name).rename(folder / name)
        os.chown(folder / name, 65534, 65534)
    why = f"my_model is in {folder}, which is not searched: {folder}/cfg.json belongs to the user "
    told = dsjob("validate", f"{folder}/cfg.json", cwd=elsewhere)
    assert f"error[untrusted-target]: model._target_: my_model.build is not trusted: {why}" in told.stderr
    done = dsjob("run", f"{folder}/cfg.json", cwd=elsewhere, fresh=True)
    assert done.returncode == 2
    assert f"cfg.json:3:5: error[untrusted-target]: model._target_: my_model.build is not trusted: {why}" in done.stderr
    assert "run dsjob in that folder, or copy the folder and run the copy" in done.stderr
    granted = dsjob("run", f"{folder}/cfg.json", "--trust", "my_model", "launch.nproc=2", cwd=elsewhere)
    assert granted.returncode == 2
    assert why in granted.stderr  # the flag trusts a name; the folder is still not searched
    there = dsjob("run", "cfg.json", f"output.dir={tmp_path}/run", cwd=folder)
    assert there.returncode == 0, there.stderr
    os.chown(tmp_path / "run" / "resolved.json", 65534, 65534)
    again = dsjob("run", f"{tmp_path}/run/resolved.json", cwd=elsewhere)
    assert again.returncode == 2
    assert f"which is not searched: {tmp_path}/run/resolved.json belongs to the user " in again.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_folder_that_strangers_write_to_is_not_searched(job: Path) -> None:
    told = partial(dsjob, "validate", "cfg.json", cwd=job)
    job.chmod(0o777)
    assert told().returncode == 0  # all of it is the user's own
    (job / "triton.py").write_text("open('ran', 'w')")
    os.chown(job / "triton.py", 65534, 65534)
    why = f"my_model is in {job}, which is not searched: anyone can write to it, and triton.py belongs to the user "
    assert why in told().stderr
    assert "move the job to a folder that only you can write to" in told().stderr
    done = dsjob("run", "cfg.json", cwd=job, fresh=True)
    assert done.returncode == 2
    assert why in done.stderr
    assert not (job / "ran").exists()
    job.chmod(0o755)
    assert told().returncode == 0  # whoever owns the folder has put it there
