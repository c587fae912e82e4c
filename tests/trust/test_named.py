"""What the user names on the command line is open to the document, and nothing else of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from job_documents import compose_file, make_job, write_json

from dsjob.front.generate import make_generation
from dsjob.front.source import Source
from dsjob.trust.grant import Trust
from dsjob.trust.named import name_places

OTHER = "/usr/share"  # a place that exists, and that no document from elsewhere may read


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".data").mkdir()
    return tmp_path


def name(*overrides: str, **sections: Any) -> Trust:
    document = make_job(**sections)
    document["data"]["train"] = {"_target_": "dsjob.text.Text", "source": OTHER, "tokenizer": OTHER}
    write_json(Path("cfg.json"), document)
    return name_places(Trust(local=False), compose_file(Path("cfg.json"), overrides))


def test_keys_are_named_as_what_they_are() -> None:
    trust = name("checkpoint.dir=s3://bucket/a", "output.dir=.runs/%name", "checkpoint.resume=/mnt/ck", "name=mine")
    assert trust.reads == ("/mnt/ck",)
    assert set(trust.writes) == {"s3://bucket/a", os.path.abspath(".runs/mine")}
    assert trust.access.explain(".runs/mine/x", write=True)[0] == ""
    # What is read may not be written: the checkpoint may be a stranger's, and in their bucket.
    read = name("checkpoint.resume=s3://stranger/ck")
    assert read.access.explain("s3://stranger/ck/x", write=True)[0] == "outside-folder"


def test_arguments_are_named_if_they_lead_somewhere() -> None:
    assert name(f"data.train.source={OTHER}").reads == (OTHER,)
    assert name("data.train.source=.data").reads == (os.path.abspath(".data"),)
    assert name("data.train.source=[.data,s3://bucket/a]").reads == (os.path.abspath(".data"), "s3://bucket/a")
    assert name("+data.train.cache_dir=.data").writes == (os.path.abspath(".data"),)
    for text in ("/", "'~'", "..", "nothing-there", "train"):
        assert name(f"+data.train.split={text}").reads == ()


def test_what_the_document_says_is_not_named() -> None:
    """An override of a mapping is merged into that of the document, whose values stay the document's."""
    trust = name("+data.train={max_samples: 3}", "trainer.max_steps=3")
    assert (trust.reads, trust.writes) == ((), ())
    trust = name("+data.train={cache_dir: .data}")
    assert (trust.reads, trust.writes) == ((), (os.path.abspath(".data"),))
    assert name("~data.train.tokenizer").reads == ()


def test_services_are_named_by_their_keys() -> None:
    section = {"monitor": {"mlflow": {"enabled": True, "tracking_uri": "http://evil"}, "wandb": {"enabled": True}}}
    trust = name("monitor.mlflow.enabled=true", **section)
    assert trust.access.names("monitor.mlflow")
    assert not trust.access.names("monitor.wandb")
    assert "http://evil" not in trust.writes
    assert "http://own" in name("monitor.mlflow.tracking_uri=http://own", **section).writes


def test_a_tokenizer_that_dsjob_takes_from_the_document_is_not_named(here: Path) -> None:
    from dsjob.document.origins import read_document
    from dsjob.front.checkpoint import Chosen

    document = make_job(generation={"tokenizer": OTHER}, data={"test": {"_target_": "dsjob.text.Text", "source": "x"}})
    write_json(Path("job.json"), document)
    chosen = Chosen("ck/step", "step", 1, False, None, read_document("job.json"))

    def find(**options: Any) -> bool:
        source: Source = make_generation(chosen, "prompts", {"tokenizer": OTHER}, options.pop("words", ()), **options)
        return OTHER in name_places(Trust(local=False), source.compose()).reads

    assert not find()
    assert find(tokenizer=OTHER)
    assert find(words=[f"generation.tokenizer={OTHER}"])


def test_variables_that_the_user_opens_are_places(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsjob.trust.user import grant

    (here / "dsjob").mkdir()
    (here / "dsjob" / "config.yaml").write_text(
        "environment: [DATA_DIR]\ntrust: ['folder:s3://bucket', 'folder:~/x']\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here))
    monkeypatch.setenv("DATA_DIR", str(here / ".data"))
    trust = grant(None)
    assert trust.access.explain(f"{here}/.data/a.txt")[0] == ""
    assert Trust.from_text(trust.to_text()) == trust
    assert [trust.access.explain(place, write=True)[0] for place in ("s3://bucket/a", "~/x/y")] == ["", ""]
