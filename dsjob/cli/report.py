"""`dsjob report`: writes an HTML page about runs."""

from __future__ import annotations

from dsjob.cli.flags import make_parser
from dsjob.terminal import print_lines


def main(arguments: list[str], debug: bool) -> int:
    """Writes the page and prints its path."""
    parser = make_parser(
        "report",
        "Write one HTML page about runs: curves, settings, environment and checkpoints, and for several runs a table "
        "and parallel coordinates. The page needs no network.",
        ("dsjob report outputs/a", "dsjob report outputs/a outputs/b -o compared.html", "dsjob report outputs"),
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="the folder of a run, or a folder of runs")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help="page (default: report.html)")
    args = parser.parse_args(arguments)
    from dsjob.report.page import write_report

    write_report(args.run, args.output)
    print_lines(f"wrote {args.output}")
    return 0
