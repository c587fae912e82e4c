"""`dsjob schema`: prints the published schema, or a part of it, for editors (JSON) or people (text)."""

from __future__ import annotations

import json

from dsjob.cli.flags import make_parser
from dsjob.contract.reference import find, to_text
from dsjob.contract.views import VIEWS, to_json_schema
from dsjob.terminal import print_block


def main(arguments: list[str], debug: bool) -> int:
    """Prints a self-contained JSON Schema document, or text."""
    parser = make_parser(
        "schema",
        "Explain a key of the job document, or print the JSON Schema for editors.",
        (
            "dsjob schema trainer",
            "dsjob schema zero_optimization.stage",
            "dsjob schema > job.schema.json",
        ),
    )
    parser.add_argument(
        "path", nargs="?", default="", metavar="PATH", help="a section or key, for example zero_optimization.stage"
    )
    parser.add_argument(
        "--format",
        choices=("json", "text"),
        help="json for editors, text for people (default: text for a PATH, otherwise json)",
    )
    parser.add_argument(
        "--view",
        choices=VIEWS,
        default="job",
        help="job: the job document (default); recipe: a recipe or config group, with defaults and ${...}; "
        "deepspeed: a DeepSpeed config",
    )
    args = parser.parse_args(arguments)
    entries = find(args.view, args.path)
    if (args.format or ("text" if args.path else "json")) == "text":
        print_block("\n".join(to_text(entry) for entry in entries))
        return 0
    schemas = [entry.schema for entry in entries]
    node = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}  # an argument of several types: one schema each
    print_block(json.dumps(to_json_schema(args.view, entries[0].path, node), indent=2))
    return 0
