"""`dsjob predict`: writes what the model of a checkpoint returns for each sample."""

from __future__ import annotations

from dsjob.cli.eval import make_task_parser, perform
from dsjob.cli.flags import add_form


def main(arguments: list[str], debug: bool) -> int:
    """Predicts, and prints the files written."""
    parser = make_task_parser(
        "predict",
        "Write the predictions of a checkpoint for data.test, or without one, for data.eval: one entry per sample, in "
        "the order of the data. The section predict of the job chooses outputs and format. The files go to "
        "predict.dir, or to the folder predict-TAG of the run.",
        (
            "dsjob predict runs/a --best",
            "dsjob predict runs/a predict.outputs='{class: outputs.logits.argmax}'",
            "dsjob predict runs/a launch.nproc=2 predict.format=safetensors predict.dir=s3://bucket/predictions",
        ),
    )
    add_form(parser)
    return perform("predict", parser.parse_intermixed_args(arguments), debug)
