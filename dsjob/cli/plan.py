"""`dsjob plan`: predicts from its document what a job needs: memory, communication, checkpoints, steps, rates."""

from __future__ import annotations

import argparse
import json

from dsjob.cli import parse_count
from dsjob.cli.flags import add_arguments, allow_granted, make_parser, read_flags
from dsjob.cli.run import split_source
from dsjob.document import compose as composition
from dsjob.errors import FitError, UsageError
from dsjob.front.plan import Asked, parse_parameters, plan_composed
from dsjob.front.schedule import plan_schedule
from dsjob.pipelines.drawing import draw_text
from dsjob.pipelines.timeline import to_record
from dsjob.planning.fit import find_remedies, sweep
from dsjob.planning.model import Offload
from dsjob.planning.report import Plan, show_bytes, to_json
from dsjob.terminal import print_block
from dsjob.trust.user import grant, read_environment

_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "param")


def main(arguments: list[str], debug: bool) -> int:
    """Plans, and prints text or JSON."""
    args = _parse(arguments)
    if args.require_fit and args.device_memory is None:
        raise UsageError("--require-fit needs --device-memory", hint="for example --device-memory 80GiB")
    if not args.source and args.params is None:
        raise UsageError(
            "dsjob plan needs a file, a run's folder or a recipe",
            hint="dsjob plan cfg.yaml, dsjob plan +recipe=quickstart, or dsjob plan --params 7B",
        )
    allow_granted(args.trust)
    file, overrides = split_source(args.source, bare=args.params is not None)
    composed = composition.compose(overrides, file=file, config_dir=args.config_dir, environment=read_environment())
    if args.schedule:
        timeline = plan_schedule(composed, grant(file, read_flags(args)), args.world_size)
        as_json = args.format == "json"
        print_block(json.dumps(to_record(timeline), indent=2) if as_json else "\n".join(draw_text(timeline)))
        return 0
    asked = Asked(args.params, args.world_size, args.device_memory, args.host_memory, args.offload)
    plan = plan_composed(composed, asked, grant(file, read_flags(args)))
    rows = sweep(plan.job) if args.sweep_stages else []
    if args.format == "json":
        print_block(json.dumps(to_json(plan, rows), indent=2))
    else:
        from dsjob.cli.plan_text import print_plan

        print_plan(plan, rows)
    if args.require_fit and not plan.fits:
        raise _explain(plan)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser(
        "plan",
        "Predict from its document what a job needs, and whether it fits, before you use a GPU.",
        (
            "dsjob plan cfg.yaml",
            "dsjob plan cfg.yaml --world-size 8 --device-memory 80GiB --require-fit",
            "dsjob plan cfg.yaml pipeline.stages=4 trainer.grad_accum=8 --schedule",
            "dsjob plan --params 7B zero_optimization.stage=3 --world-size 64 --sweep-stages",
        ),
    )
    parser.add_argument(
        "source", nargs="*", metavar="FILE|+recipe=NAME|key=value", help="what to plan, as for dsjob run"
    )
    parser.add_argument(
        "--params",
        type=_parse_parameters,
        metavar="N",
        help="plan for this number of parameters (7e9, 7B, 350M) instead of the model",
    )
    parser.add_argument(
        "--world-size", type=parse_count, metavar="N", help="number of ranks to plan for (default: launch.nproc)"
    )
    parser.add_argument(
        "--device-memory", type=_parse_size, metavar="SIZE", help="memory of a device, for example 80GiB"
    )
    own = "memory of a machine, which launch.nproc ranks share (default: that of this machine)"
    parser.add_argument("--host-memory", type=_parse_size, metavar="SIZE", help=own)
    parser.add_argument("--offload", choices=_OFFLOADS, help="what to offload, instead of the document's setting")
    parser.add_argument(
        "--sweep-stages", action="store_true", help="also print a table of ZeRO stage x offload x micro batch"
    )
    parser.add_argument(
        "--schedule", action="store_true", help="print the timeline of the pipeline's stages instead, with its bubbles"
    )
    parser.add_argument("--require-fit", action="store_true", help="exit with code 3 if the job does not fit")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format (default: text)")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder with configs of your own")
    add_arguments(parser)
    return parser.parse_intermixed_args(arguments)


def _parse_parameters(text: str) -> int:
    try:
        return parse_parameters(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def _parse_size(text: str) -> int:
    from dsjob.checkpoint.offline.convert import parse_size

    try:
        size = parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: write 80GiB")
    return size


def _explain(plan: Plan) -> FitError:
    """The error for a job that does not fit: names the biggest item, and single changes that would make it fit."""
    assert plan.limit is not None
    memory = plan.memory
    moment = memory.peak_moment
    biggest = max((item for item in memory.items if item.place == "device"), key=lambda item: getattr(item, moment))
    remedies = find_remedies(plan.job, plan.limit, None if plan.activations.on else plan.activations.with_checkpointing)
    return FitError(
        f"the job does not fit: a rank needs {show_bytes(memory.peak)}, a device has {show_bytes(plan.limit)}; "
        f"the biggest item is {biggest.name}, {show_bytes(getattr(biggest, moment))}",
        hint=f"any of these would make it fit: {'; '.join(remedies)}"
        if remedies
        else "no single change to micro batch, stage or number of ranks (up to 4,096) would make it fit: "
        "combine several of them, or use a smaller model",
    )
