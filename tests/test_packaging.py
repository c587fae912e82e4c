"""The wheel holds what git has and works without the repository; a clone works without being installed."""

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

ALONE = ("--no-deps", "--no-index")
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


def make_clone(folder: Path) -> Path:
    """A copy of the repository as a clone would have it."""
    for name in list_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a clone."""
    copy, out = make_clone(tmp_path_factory.mktemp("built")), tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = out.glob("*.whl")
    return built


def make_environment(root: Path) -> Path:
    """A fresh virtual environment without dsjob; dependencies are found where the tests find theirs."""
    venv.create(root, with_pip=False)
    # Comes after the environment's own folder, and what .pth files there say (an editable dsjob) is not read.
    places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    (find_site(root) / "dependencies.pth").write_text("\n".join(places) + "\n")
    return root


def find_site(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the dependencies alone."""
    return make_environment(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    root = make_environment(tmp_path_factory.mktemp("fresh") / "venv")
    python = str(root / "bin" / "python")
    subprocess.run(
        # The dependencies' folder may hold a dsjob of this version, with which pip would be content.
        [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--ignore-installed", *ALONE, str(wheel)],
        check=True,
        capture_output=True,
        text=True,
    )
    return root


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone that differs from what is installed: it has another version, and a recipe of its own."""
    folder = make_clone(tmp_path_factory.mktemp("clone"))
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace('\nversion = "', '\nversion = "99.'))
    shutil.copyfile(folder / "recipes" / "gpt.py", folder / "recipes" / "cloned.py")
    write_json(folder / "job.json", make_job())
    return folder


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
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name.partition("/")[0]}
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


@pytest.mark.parametrize(
    "recipe",
    ["quickstart", *(pytest.param(r, marks=pytest.mark.full) for r in ("zero2_gpt", "zero3_t5", "vision_digits"))],
)
def test_the_installed_command_shows_the_recipes(installed: Path, tmp_path: Path, recipe: str) -> None:
    document = yaml.safe_load(run(installed, tmp_path, "dsjob", "show", f"+recipe={recipe}"))
    assert document["name"] == recipe
    assert document["model"]["_target_"].startswith("dsjob.recipes.")


@pytest.mark.full
def test_the_models_of_the_recipes_can_be_imported_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    probe = "from dsjob.trust.targets import find_target as f; print(f('dsjob.recipes.gpt.build').__code__.co_filename)"
    assert Path(run(installed, tmp_path, "python", "-c", probe).strip()).is_relative_to(installed)


FILES = """
import dsjob, dsjob.conf, dsjob.recipes.gpt, dsjob.schemas
print(dsjob.__version__, *(m.__file__ for m in (dsjob, dsjob.conf, dsjob.recipes.gpt, dsjob.schemas)))
"""


# Where a package is installed, a clone can go wrong in more ways.
ENVIRONMENTS = pytest.mark.parametrize("environment", [pytest.param("bare", marks=pytest.mark.full), "installed"])


@ENVIRONMENTS
def test_a_clone_uses_its_own_files(environment: str, clone: Path, request: pytest.FixtureRequest) -> None:
    python = request.getfixturevalue(environment)
    version, *files = run(python, clone, "python", "-c", FILES).split()
    assert version.startswith("99.")
    assert len(files) == 4
    assert all(Path(file).is_relative_to(clone) for file in files)
    assert run(python, clone, "python", "-m", "dsjob", "validate", "job.json") == "job.json: ok\n"
    assert version in run(python, clone, "python", "-m", "dsjob", "--version")
    probe = "import dsjob.deepspeed as d; print(d.__file__, d.dsjob_version)"
    assert run(python, clone, "python", "-c", probe).split() == [str(clone / "dsjob/deepspeed/__init__.py"), version]


@ENVIRONMENTS
@pytest.mark.full
def test_the_ranks_of_a_clone_are_the_clones_own(
    environment: str, clone: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They are new processes, which do not search the current folder."""
    changes = ["launch.nproc=2", "trainer.max_steps=1", "trainer.eval_every=0", "~callbacks.sample", "~scheduler"]
    changes += ["model._target_=dsjob.recipes.cloned.build", f"output.dir={tmp_path / 'run'}"]
    run(request.getfixturevalue(environment), clone, "python", "-m", "dsjob", "+recipe=quickstart", *changes)
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.full
def test_the_tests_of_a_clone_run_without_dsjob_installed(bare: Path, clone: Path) -> None:
    runs = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_schema.py"]
    assert " passed" in run(bare, clone, "python", *runs)


def make_lures(folder: Path, project: str) -> list[Path]:
    """Folders that dsjob would find beside it in a clone, which say so when they are imported."""
    for name in ("conf", "ops", "recipes", "schemas"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('the wrong folder')")
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{project}"\n')
    return list(folder.iterdir())


@pytest.mark.full
def test_an_installed_package_ignores_a_clone_in_the_current_folder(installed: Path, tmp_path: Path) -> None:
    make_lures(tmp_path, "dsjob")
    _, *files = run(installed, tmp_path, "python", "-c", FILES).split()
    assert all(Path(file).is_relative_to(installed) for file in files)
    run(installed, tmp_path, "dsjob", "show", "+recipe=quickstart")


@pytest.mark.full
def test_an_installed_package_ignores_folders_beside_it(installed: Path, tmp_path: Path) -> None:
    """Other projects have packed theirs, with their project file, into site-packages."""
    lures = [find_site(installed) / path.name for path in make_lures(tmp_path, "other")]
    try:
        for path in tmp_path.iterdir():
            shutil.move(path, find_site(installed))
        _, *files = run(installed, tmp_path, "python", "-c", FILES).split()
        assert all(Path(file).is_relative_to(find_site(installed) / "dsjob") for file in files)
        probe = "import dsjob.ops; print(dsjob.ops.__file__)"
        assert Path(run(installed, tmp_path, "python", "-c", probe).strip()).is_relative_to(
            find_site(installed) / "dsjob"
        )
    finally:
        for path in lures:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.full
def test_a_wheel_can_contain_built_ops(clone: Path, tmp_path: Path) -> None:
    """DSJOB_BUILD_OPS=1: a library that is found without a compiler, in a wheel for this kind of machine only."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(clone)]
    environment = {**os.environ, "DSJOB_BUILD_OPS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    code = "from dsjob.ops import build, registry; print(build.find_built(registry.OPS['cpu_optimizers']))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "DSJOB_OPS_DIR": str(tmp_path / "none")}
    environment["CXX"] = "a-compiler-that-does-not-exist"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "site" / "dsjob" / "ops" / "built")
