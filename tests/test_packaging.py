"""The wheel holds what git has, and works where there is no repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from job_documents import make_job, write_json

REPOSITORY = Path(__file__).parent.parent
FOLDERS: dict[str, str] = {  # folder of the repository: where the package has it
    folder: package.replace(".", "/")
    for package, folder in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].items()
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("git") is None or not (REPOSITORY / ".git").exists(), reason="needs the repository's list of files"
    ),
]


def list_files() -> list[str]:
    """What git has or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the repository as a clone would have it."""
    copy, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    for name in list_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel alone; dependencies are found where the tests find theirs."""
    root = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)],
        check=True,
        capture_output=True,
        text=True,
    )
    (site,) = root.glob("lib/python*/site-packages")
    # Comes after the wheel's own folder, and what .pth files there say (an editable dsjob) is not read.
    places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(places) + "\n")
    return root


def run(installed: Path, folder: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    expected = {
        f"{FOLDERS[folder]}/{rest}"
        for folder, _, rest in (name.partition("/") for name in list_files())
        if folder in FOLDERS
    }
    assert len(expected) > 50
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_wheel_carries_its_license_and_its_command(wheel: Path) -> None:
    files = {name.rpartition(".dist-info/")[2]: name for name in zipfile.ZipFile(wheel).namelist()}
    assert "licenses/LICENSE" in files
    assert b"dsjob = dsjob.cli:main" in zipfile.ZipFile(wheel).read(files["entry_points.txt"])


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    probe = "import dsjob, dsjob.conf, dsjob.recipes, dsjob.schemas as s; print(dsjob.__file__, s.__file__)"
    files = run(installed, tmp_path, "python", "-c", probe).split()
    assert len(files) == 2
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_the_installed_command_validates_a_document(installed: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "job.json", make_job())
    assert run(installed, tmp_path, "dsjob", "validate", "job.json") == "job.json: ok\n"


@pytest.mark.parametrize("recipe", ["quickstart", "zero2_gpt", "zero3_t5", "vision_digits"])
def test_the_installed_command_shows_the_recipes(installed: Path, tmp_path: Path, recipe: str) -> None:
    document = yaml.safe_load(run(installed, tmp_path, "dsjob", "show", f"+recipe={recipe}"))
    assert document["name"] == recipe
    assert document["model"]["_target_"].startswith("dsjob.recipes.")


def test_the_models_of_the_recipes_can_be_imported_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    probe = "from dsjob.trust.targets import find_target as f; print(f('dsjob.recipes.gpt.build').__code__.co_filename)"
    assert Path(run(installed, tmp_path, "python", "-c", probe).strip()).is_relative_to(installed)
