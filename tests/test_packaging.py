"""What is shipped is what is here, and it works where no checkout is."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELVES = {"pipelined": "pipelined", "transports": "pipelined/transports", "models": "pipelined/models"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def shipped_names() -> set[str]:
    """Every module of the tree, and every data file, by its place in the wheel."""
    return {
        f"{place}/{path.relative_to(ROOT / shelf).as_posix()}"
        for shelf, place in SHELVES.items()
        for path in (ROOT / shelf).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_folder_is_a_listed_package():
    folders = {str(Path(name).parent).replace("/", ".") for name in shipped_names() if name.endswith(".py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_every_package_says_that_it_is_one():
    modules = {name for name in shipped_names() if name.endswith(".py")}
    assert {f"{Path(name).parent}/__init__.py" for name in modules} <= modules


def test_entry_points_name_what_is_there():
    modules = shipped_names()
    for group in PROJECT["project"]["entry-points"].values():
        for value in group.values():
            assert value.partition(":")[0].replace(".", "/") + ".py" in modules, value


def test_constraints_pin_everything_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "exact, and without local versions"
    assert "torch==2.13.0" in lines


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, and the wheel that was built from it. The tree itself is left alone."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    for name in SHELVES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """An interpreter that has the wheel and the dependencies of this one, and no way to the checkout."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", built[1]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path named in a .pth file is searched, but its own .pth files, the editable install's among them, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return interpreter


def run(*command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_tree(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == shipped_names()
    assert "pipelined/py.typed" in names
    assert {f"pipelined/trace/page/page.{kind}" for kind in ("html", "css", "js")} <= names


@pytest.mark.slow
def test_the_sdist_holds_licence_and_readme(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "transports/memory.py", "models/toy.py"} <= names


@pytest.mark.slow
def test_installed_it_is_whole(python, tmp_path):
    program = """
import importlib.util, json
from importlib.metadata import entry_points
import pipelined
found = [point for shelf in ("transports", "models") for point in entry_points(group=f"pipelined.{shelf}")]
points = {point.name: point.load().__module__ for point in found}
strays = [name for name in ("transports", "models") if importlib.util.find_spec(name)]
print(json.dumps([pipelined.__file__, points, strays]))
"""
    place, points, strays = json.loads(run(python, "-c", program, folder=tmp_path))
    assert Path(place).is_relative_to(python.parents[1])
    assert {"memory", "shm", "zmq", "hf", "toy"} <= set(points)
    assert all(module.startswith(("pipelined.transports.", "pipelined.models.")) for module in points.values())
    assert strays == [], "the shelves are no import names of their own"


@pytest.mark.slow
def test_installed_command(python, tmp_path):
    command = python.with_name("pipelined")
    assert "generate" in run(command, "--help", folder=tmp_path)
    assert "pipelined 0." in run(python, "-m", "pipelined", "--version", folder=tmp_path)
    arguments = ("toy://", "--pp-size", "2", "--prompt-tokens", "1,2,3", "--max-tokens", "4", "--json")
    answer = json.loads(run(command, "generate", *arguments, folder=tmp_path))
    assert len(answer["token_ids"]) == 4
    assert [stage["layers"] for stage in answer["stages"]] == [[0, 4], [4, 8]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import pipelined", ["torch", "transformers", "numpy", "zmq", "asyncio"]),
        ("import pipelined.scheduler, pipelined.kv, pipelined.chunking", ["torch", "transformers", "asyncio", "zmq"]),
        ("from pipelined import Pipeline, Stage; import pipelined.rank.process", ["transformers", "tokenizers"]),
        ("from pipelined.cli.options import add_engine_options", ["torch", "transformers", "asyncio"]),
    ],
)
def test_imports_cost_no_more_than_they_must(python, tmp_path, statement, absent):
    program = f"{statement}\nimport sys; print([name for name in {absent} if name in sys.modules])"
    assert run(python, "-c", program, folder=tmp_path).strip() == "[]"
