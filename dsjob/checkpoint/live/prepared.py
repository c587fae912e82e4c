"""A planned save: what this rank will write, and on rank 0 the content of the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsjob import storage
from dsjob.checkpoint.format import zero_to_fp32 as layout
from dsjob.checkpoint.format.values import encode_file
from dsjob.checkpoint.live.shards import Part, list_tensors
from dsjob.errors import CheckpointError


@dataclass(frozen=True)
class PreparedSave:
    """One save on one rank. For a background save, `parts` are copies, so training does not change them."""

    url: str
    folder: str
    tag: str
    rank: int
    world_size: int
    parts: list[Part]
    described: dict[str, TensorStorageMetadata]
    roles: dict[str, str]
    values: dict[str, Any]
    manifest: dict[str, Any]

    def complete(self, records: Sequence[dict[str, Any]], job: Mapping[str, Any] | None) -> dict[str, Any]:
        """Checks the size of every rank's file, writes state.json and job.json, and returns the manifest.

        Raises CheckpointError if a file has the wrong size, or if a value exceeds the limits of readers.
        """
        files = {}
        for record in records:
            if record["file"] is None:
                continue
            found = storage.size(storage.join(self.url, record["file"]))
            if found != record["size"]:
                raise CheckpointError(
                    f"{self.url}/{record['file']} has {found} bytes, but {record['size']} were written"
                )
            files[record["file"]] = {"size": record["size"]}
        plain = {"state": self.values, **({"job": job} if job is not None else {})}
        places = {name: storage.join(self.url, f"{name}.json") for name in plain}
        # Encode both first: a value beyond the limits of readers then fails before either file is written.
        texts = {name: encode_file(value, places[name], layout.MAX_MANIFEST) for name, value in plain.items()}
        for name, text in texts.items():
            storage.write_bytes(places[name], text)
        return {
            **self.manifest,
            "files": files,
            "tensors": list_tensors(self.described, list(records), self.roles.__getitem__),
            **{f"{name}_sha256": hashlib.sha256(text).hexdigest() for name, text in texts.items()},
        }
