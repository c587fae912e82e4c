"""The Trainer's `report_to` and `logging_dir` as sections of `monitor`."""

from __future__ import annotations

from dsjob.importing.given import Draft, Rank, Settings, is_off

# report_to: the section of `monitor`
SERVICES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet_ml": "comet", "mlflow": "mlflow"}


def draft_services(settings: Settings, draft: Draft) -> None:
    """Adds the monitors that `report_to` names to the draft."""
    given, folder = settings["report_to"], settings["logging_dir"]
    if given.rank == Rank.DEFAULT or is_off(given.value):  # a default names services that may not be installed
        names: list[str] = []
    else:
        names = given.value if isinstance(given.value, list) else str(given.value).replace(",", " ").split()
    for name in map(str, names):
        if name in SERVICES:
            draft.put(f"monitor.{SERVICES[name]}.enabled", given.to(True))
        elif name == "all":
            text = f"name the services, which are {', '.join(SERVICES)}"
            draft.note("left out", f"{given.label}: {text}", given)
        elif name != "none":
            text = f"dsjob has no monitor for {name}: write one of your own (monitor.custom)"
            draft.note("left out", f"{given.label}: {text}", given)
    if is_off(folder.value) or folder.rank == Rank.DEFAULT:
        return
    if "tensorboard" in names:
        draft.put("monitor.tensorboard.output_path", folder)
    else:
        draft.note("left out", f"{folder.label}: only TensorBoard uses it (--report_to tensorboard)", folder)
