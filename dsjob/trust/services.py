"""The servers to which a run sends metrics. Credentials of the environment go only to servers that the user has chosen.

A document can name a server of MLflow. W&B and Comet find theirs in the user's own settings; a document from elsewhere
may still not send anything there on its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dsjob.contract.access import Access, has_task
from dsjob.contract.locations import find_protocol, shorten
from dsjob.contract.paths import Path, get_at
from dsjob.errors import Problem
from dsjob.terminal import quote_word

_SERVICES = ("wandb", "comet", "mlflow")
_URI = ("monitor", "mlflow", "tracking_uri")
# What MLflow, and the databases that can be its server, send to whatever server they are given.
_CREDENTIALS = (
    "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_AUTH",
    "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH", "PGPASSWORD", "PGPASSFILE", "MYSQL_PWD",
)  # fmt: skip
_FILES = ("~/.mlflow/credentials", "~/.pgpass")
_DATABASE = re.compile(r"sqlite(\+\w+)?:///?")


def check_services(document: Mapping[str, Any], access: Access) -> Iterator[Problem]:
    """Problems with the services that a document lets a run send metrics to."""
    if not has_task(document, "train"):
        return  # monitors are for training
    for name in _SERVICES:
        section: Path = ("monitor", name)
        if get_at(document, (*section, "enabled")) is not True:
            continue
        if not access.own and not access.names(f"monitor.{name}"):
            message = "this document comes from elsewhere, so it may not send metrics with your account"
            hint = f"monitor.{name}.enabled=true on the command line allows it, false leaves it out"
            yield Problem(message, (*section, "enabled"), "outside-folder", hint)
        uri = get_at(document, (*section, "tracking_uri"))
        if name == "mlflow" and isinstance(uri, str):
            yield from _check_uri(uri, access)


def _check_uri(uri: str, access: Access) -> Iterator[Problem]:
    path = _find_local(uri)
    if path is not None:
        rule, message, hint = access.explain(path, write=True)
        if rule:
            yield Problem(f"{shorten(uri)}: {message}", _URI, rule, hint)
    elif not (uri in access.writes or _find_server(uri) == _find_server(os.environ.get("MLFLOW_TRACKING_URI", ""))):
        found = [name for name in _CREDENTIALS if os.environ.get(name)]
        found += [file for file in _FILES if os.path.exists(os.path.expanduser(file))]
        setting = quote_word(f"{'.'.join(_URI)}={uri}")
        hint = f"to use this server, set MLFLOW_TRACKING_URI={quote_word(uri)}, or write {setting} on the command line"
        if found:
            message = f"{shorten(uri)}: only the document names this server, and MLflow would send it {found[0]}"
            yield Problem(message, _URI, "credentials", hint)
        elif not access.own:
            message = f"{shorten(uri)}: this document comes from elsewhere, so it may not choose where metrics go"
            yield Problem(message, _URI, "outside-folder", hint)


def _find_local(uri: str) -> str | None:
    """The local path that MLflow would write to; None for a server."""
    if found := _DATABASE.match(uri):
        return uri[found.end() :].partition("?")[0].removeprefix("file:") or "."
    if uri.startswith("file:"):
        return urlsplit(uri).path or "."
    named = "://" in uri or find_protocol(uri) != "file" or re.match(r"(databricks|uc)(-\w+)?(:|$)", uri)
    return None if named else uri


def _find_server(uri: str) -> tuple[str, str]:
    """The protocol and the host of a URI."""
    try:
        found = urlsplit(uri)
    except ValueError:  # not a URL
        return "", uri
    return found.scheme.lower(), found.netloc.rpartition("@")[2].lower()
