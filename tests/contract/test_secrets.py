"""Secrets in URLs are told of and hidden."""

import pytest

from dsjob import storage
from dsjob.contract.secrets import describe_secret, find_secrets, hide_secrets, hide_value, is_reference, redact
from dsjob.errors import StorageError

CANARY = "hunter2-canary"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://me:{CANARY}@bucket/x",
        f"s3://{CANARY}@bucket/x",
        f"https://host/x?X-Amz-Signature={CANARY}&a=b",
        f"https://account.blob/x?sv=1&sig={CANARY}",
        f"s3://bucket/x?aws_secret_access_key={CANARY}",
        f"ftp://host/x?password={CANARY}",
        f"abfs://user:{CANARY}@account/x",
        f"simplecache::s3://me:{CANARY}@bucket/x",
        f"gs://bucket/x?access_token={CANARY}",
        f"s3://AKIA:wJalr/{CANARY}/K7@bucket/x",
        f"https://host/x#token={CANARY}",
        f"https://host/x?accessKey={CANARY}",
    ],
)
def test_secrets_are_refused_and_hidden(url: str) -> None:
    assert describe_secret(url)
    assert CANARY not in describe_secret(url)
    assert CANARY not in redact(f"cannot open {url}: no")
    for call in (storage.exists, storage.read_bytes, storage.list_names, storage.make_folder):
        with pytest.raises(StorageError) as caught:
            call(url)
        assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b",
        "abfs://container@account.dfs.core.windows.net/x",
        "/a/b?key=1",
        "a:b@c",
        "https://h/x?page=1",
        "s3://b/x?monkey=1",
    ],
)
def test_other_urls_are_left_alone(url: str) -> None:
    assert describe_secret(url) == ""
    if "?key" not in url:
        assert redact(f"cannot open {url}: no") == f"cannot open {url}: no"


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "access-token", "authToken", "secret", "awsSecretAccessKey", "API_KEY", "db.password"),
        *("github_token", "wandb-token", "authorization", "credentials", "connection_string", "DSN", "db_pwd"),
    ],
)
def test_names_of_secrets(key: str) -> None:
    document = {"a": [{"b": {key: CANARY}}], key: ""}
    assert list(find_secrets(document)) == [(("a", 0, "b", key), CANARY)]
    assert hide_value(f"+a.{key}={CANARY}") == f"+a.{key}=***"
    assert hide_value(f"a={{{key}:{CANARY}}}") == "a=***"


@pytest.mark.parametrize(
    "key",
    [
        *("pad_token", "eos_token", "tokenizer", "tokens", "key", "monkey", "secretary", "image_token", "bos_token"),
        *("unk_token", "sep_token", "cls_token", "mask_token", "hf_token_id", "eos_token_id", "additional_end_token"),
        *("max_token", "loss_per_token"),
    ],
)
def test_other_names_are_no_secrets(key: str) -> None:
    assert list(find_secrets({key: "x"})) == []
    assert hide_value(f"a.{key}=x") == f"a.{key}=x"


def test_numbers_and_lists_under_a_name_of_a_secret_are_secrets_and_switches_are_none() -> None:
    document = {"password": 123, "tokens": 5, "use_auth_token": True, "api_key": ["a", 2.5], "token": None}
    assert list(find_secrets(document)) == [(("password",), 123), (("api_key", 0), "a"), (("api_key", 1), 2.5)]


def test_what_is_shown_has_references_and_no_secrets() -> None:
    document = {"a": [{"token": CANARY, "b": "${oc.env:X}"}], "hf_token": "${oc.env:X,null}", "dsn": [CANARY], "c": 1}
    hidden = {"a": [{"token": "***", "b": "${oc.env:X}"}], "hf_token": "${oc.env:X,null}", "dsn": "***", "c": 1}
    assert hide_secrets(document) == hidden


@pytest.mark.parametrize("override", [f"data.url=postgresql://u:{CANARY}@h/db", f"token:{CANARY}", f"pwd {CANARY}"])
def test_overrides_are_shown_without_secrets(override: str) -> None:
    assert CANARY not in hide_value(override)


def test_a_reference_may_have_null_and_nothing_else_in_its_place() -> None:
    assert is_reference("${oc.env:HF_TOKEN}")
    assert is_reference("${oc.env:HF_TOKEN, null}")
    assert not is_reference(f"${{oc.env:HF_TOKEN,{CANARY}}}")
    assert not is_reference("x${oc.env:HF_TOKEN}")
