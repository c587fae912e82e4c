"""Credentials of the environment go only to servers that the user has chosen."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_documents import make_job, write_json
from jobs import dsjob

from dsjob.contract.access import Access
from dsjob.trust.services import check_services


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TOKEN", "USERNAME", "PASSWORD", "URI"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def find(access: Access | None = None, **monitors: Any) -> list[tuple[str, str]]:
    document = make_job(monitor={name: {"enabled": True, **section} for name, section in monitors.items()})
    return [(problem.rule, problem.dotted) for problem in check_services(document, access or Access())]


URI = "monitor.mlflow.tracking_uri"
SERVERS = [
    "http://evil.example/", "HTTPS://evil.example", "http://user.example:5000/mlflow", "mlflow-artifacts://evil/",
    "postgresql://evil/x", "mysql+pymysql://evil/x", "mssql://evil/x", "plugin-of-mine://evil", "http://[bad",
    "http://user.example@evil.example/", "ftp://evil/",
]  # fmt: skip


@pytest.mark.parametrize("uri", SERVERS)
def test_a_server_that_only_the_document_names_gets_no_credentials(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(mlflow={"tracking_uri": uri}) == []  # there is nothing to send
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "PGPASSWORD"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "secret")
            patch.setenv("MLFLOW_TRACKING_URI", "http://user.example")
            assert find(mlflow={"tracking_uri": uri}) == [("credentials", URI)]
            assert find(Access(writes=(uri,)), mlflow={"tracking_uri": uri}) == []  # on the command line


def test_the_users_own_server_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example/")
    for uri in ("https://mlflow.example", "https://mlflow.example/other", "HTTPS://MLflow.example/x"):
        assert find(mlflow={"tracking_uri": uri}) == []
    for uri in ("http://mlflow.example", "https://mlflow.example:444", "https://mlflow.example.evil"):
        assert find(mlflow={"tracking_uri": uri}) == [("credentials", URI)], uri
    assert find(mlflow={}) == []  # MLflow's own settings decide


def test_credentials_in_files_count(tmp_path: Path) -> None:
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\n")
    assert find(mlflow={"tracking_uri": "http://evil.example"}) == [("credentials", URI)]


def test_folders_and_databases_are_places_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    for uri in ("mlruns", "./mlruns", "file:mlruns", "sqlite:///runs.db", "sqlite:////mnt/runs.db", "/mnt/mlruns"):
        assert find(mlflow={"tracking_uri": uri}) == [], uri
    for uri in ("~/.ssh", "file:///etc/x", "sqlite:////etc/x.db", "sqlite:///.ssh/x", "sqlite:///file:.ssh/x?uri=true"):
        assert find(mlflow={"tracking_uri": uri}) == [("private-file", URI)], uri
    stranger = Access(own=False, writes=("monitor.mlflow",))
    for uri in ("/mnt/mlruns", "sqlite:////mnt/runs.db", "../mlruns"):
        assert find(stranger, mlflow={"tracking_uri": uri}) == [("outside-folder", URI)], uri
    assert find(stranger, mlflow={"tracking_uri": "mlruns"}) == []


@pytest.mark.parametrize("name", ["wandb", "comet", "mlflow"])
def test_a_document_from_elsewhere_sends_nothing_with_the_users_account(name: str) -> None:
    stranger = Access(own=False)
    assert find(stranger, **{name: {}}) == [("outside-folder", f"monitor.{name}.enabled")]
    assert find(Access(own=False, writes=(f"monitor.{name}",)), **{name: {}}) == []
    assert find(stranger, **{name: {"enabled": False}}) == []
    assert find(Access(own=False, writes=("monitor.mlflow",)), mlflow={"tracking_uri": "http://evil.example"}) == [
        ("outside-folder", URI)
    ]


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A web server, and what requests have sent it as credentials."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers.get("Authorization")))
            self.send_error(404)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", seen
    made.shutdown()
    made.server_close()


def test_a_run_sends_the_token_to_no_server_of_a_document(server: tuple[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    url, seen = server
    document = make_job(
        model={"_target_": "dsjob.recipes.gpt.build", "layers": 1, "width": 16, "heads": 1, "context": 8},
        data={"train": {"_target_": "dsjob.recipes.text.ByteText", "context": 8, "max_bytes": 400}},
        trainer={"train_batch": 2, "max_steps": 1, "log_every": 1},
        monitor={"mlflow": {"enabled": True, "tracking_uri": url}},
        launch={"device": "cpu"},
    )
    write_json(tmp_path / "cfg.json", document)
    environment = {"MLFLOW_TRACKING_TOKEN": "a-secret-token", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    for command in ("validate", "run"):
        done = dsjob(command, "cfg.json", cwd=tmp_path, HOME=str(tmp_path), **environment)
        assert done.returncode == 2
        assert f"error[credentials]: {URI}: {url}: only the document names this server" in done.stderr
        assert f"MLFLOW_TRACKING_URI={url}" in done.stderr
    assert seen == []
    # The attack is one: the user may allow it.
    dsjob("run", "cfg.json", f"{URI}={url}", cwd=tmp_path, HOME=str(tmp_path), **environment)
    assert "Bearer a-secret-token" in seen
