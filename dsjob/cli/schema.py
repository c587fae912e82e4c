"""`dsjob schema`: the published schema, or the part of it at a dotted path, for editors (JSON) or people (text)."""

from __future__ import annotations

import json
import sys

from dsjob.cli.flags import make_parser
from dsjob.contract.reference import find, to_text
from dsjob.contract.views import VIEWS, to_json_schema


def main(arguments: list[str], debug: bool) -> int:
    """Prints a JSON Schema document without references to others, or text."""
    parser = make_parser(
        "schema",
        "Print the schema of job documents, or what is known of a key.",
        (
            "dsjob schema trainer",
            "dsjob schema zero_optimization.stage",
            "dsjob schema > job.schema.json",
        ),
    )
    parser.add_argument("path", nargs="?", default="", metavar="PATH", help="a section or key: zero_optimization.stage")
    parser.add_argument(
        "--format",
        choices=("json", "text"),
        help="json for editors, text for people; json of the whole, text of a part",
    )
    parser.add_argument(
        "--view",
        choices=VIEWS,
        default="job",
        help="the job document; a recipe or group, with defaults and ${...}; a bare DeepSpeed config",
    )
    args = parser.parse_args(arguments)
    entries = find(args.view, args.path)
    if (args.format or ("text" if args.path else "json")) == "text":
        sys.stdout.write("\n".join(to_text(entry) for entry in entries))
        return 0
    schemas = [entry.schema for entry in entries]
    node = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}  # an argument, as each type takes it
    print(json.dumps(to_json_schema(args.view, entries[0].path, node), indent=2))  # noqa: T201
    return 0
