"""From the setting `workload` to an object: what is found, and the one line when it is not. No JAX is imported."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from gradbus.workloads.base import WorkloadError, is_stateful
from gradbus.workloads.loading import load, source_sha256

GOOD = """
class Mine:
    size = 3
    def init(self, key): ...
    def loss(self, params, batch, key): ...
    def train_data(self, folder): ...
    def eval_data(self, folder): ...
    def score(self, params, batch): ...

class WithState(Mine):
    def init_state(self, key): ...

class NeedsArguments(Mine):
    def __init__(self, size): ...

class Failing(Mine):
    def __init__(self):
        raise RuntimeError("no such luck\\nand more")

class Callable(Mine):
    def __call__(self):
        raise AssertionError("an instance is not called")

instance = Mine()
callable_instance = Callable()
make = lambda: Mine()
half = type("Half", (), {"init": lambda self, key: None})
number = 7
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GOOD)
    return path


def refused(spec: str) -> str:
    with pytest.raises(WorkloadError) as error:
        load(spec)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"workload {spec}: ")
    return line.removeprefix(f"workload {spec}: ")


@pytest.mark.parametrize("name", ["Mine", "instance", "make", "callable_instance"])
def test_a_file_gives_a_class_an_instance_or_a_function(mine: Path, name: str) -> None:
    assert load(f"{mine}:{name}").size == 3


def test_a_relative_path_starts_at_the_working_directory(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    assert not is_stateful(load("mine.py:Mine"))
    assert is_stateful(load("./mine.py:WithState"))


def test_a_file_may_import_its_neighbours_and_use_dataclasses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_mine.py").write_text(GOOD)
    text = "from __future__ import annotations\nimport dataclasses, neighbour_of_mine\n"
    text += "@dataclasses.dataclass\nclass Model(neighbour_of_mine.Mine):\n    width: int = 5\n"
    (tmp_path / "model.py").write_text(text)
    assert load(f"{tmp_path}/model.py:Model").width == 5


def test_a_module_on_the_import_path(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    mine.rename(mine.with_name("module_of_mine.py"))
    assert load("module_of_mine:Mine").size == 3


def test_a_changed_file_is_read_anew(mine: Path) -> None:
    load(f"{mine}:Mine")
    mine.write_text(GOOD.replace("size = 3", "size = 4000"))
    assert load(f"{mine}:Mine").size == 4000


# --- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_typo_in_a_shipped_name() -> None:
    assert "did you mean digits?" in refused("digit")
    assert "there are cifar10, digits, fashion" in refused("resnet")


def test_no_such_file(mine: Path) -> None:
    assert refused(f"{mine.parent}/mime.py:Mine") == f"no file {mine.parent}/mime.py; did you mean mine.py?"
    assert refused("/nowhere/mine.py:Mine") == "no file /nowhere/mine.py"


def test_no_such_name(mine: Path) -> None:
    assert refused(f"{mine}:Mina") == f"{mine} defines no 'Mina'; did you mean Mine?"


def test_a_file_without_a_name(mine: Path) -> None:
    assert "as in" in refused(f"{mine}") and f"{mine}:MyModel" in refused(f"{mine}")


@pytest.mark.parametrize("name", ["", "a.b", "a b"])
def test_a_name_that_is_none(mine: Path, name: str) -> None:
    assert "name being one identifier" in refused(f"{mine}:{name}")


def test_no_such_module() -> None:
    assert refused("no_such_module_here:Mine").startswith("no module no_such_module_here on the import path")


def test_a_module_that_a_user_module_lacks(mine: Path) -> None:
    mine.write_text("\nimport not_installed_anywhere\n")
    line = refused(f"{mine}:Mine")
    assert line == (
        "importing it raised ModuleNotFoundError: No module named 'not_installed_anywhere' " + f"({mine}:2)"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero ({}:2)"),
        ("def f(:\n    pass\n", "SyntaxError: invalid syntax ({}:1)"),
        ("import json\n\njson.loads('{{')\n", "({}:3)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 ({}:1)"),
        ("raise FileNotFoundError(2, 'No such file', 'weights.bin')\n", "'weights.bin' ({}:1)"),
        ("raise ValueError\n", "ValueError ({}:1)"),
    ],
)
def test_a_file_that_raises(mine: Path, text: str, line: str) -> None:
    mine.write_text(text)
    found = refused(f"{mine}:Mine")
    assert found.startswith("importing it raised ") and found.endswith(line.format(mine))


def test_a_class_that_raises(mine: Path) -> None:
    assert refused(f"{mine}:Failing").startswith("calling Failing() raised RuntimeError: no such luck (")
    assert "missing 1 required positional argument: 'size'" in refused(f"{mine}:NeedsArguments")


def test_something_that_is_no_workload(mine: Path) -> None:
    line = (
        "number is of type int, without init, loss, train_data, eval_data, score; expected an object with the methods "
    )
    assert refused(f"{mine}:number").startswith(line)
    assert "half is of type Half, without loss, train_data, eval_data, score;" in refused(f"{mine}:half")


# --- the source ----------------------------------------------------------------------------------------------------


def test_source_hash(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hashlib.sha256(GOOD.encode()).hexdigest()
    assert source_sha256(f"{mine}:Mine") == expected
    assert source_sha256("digits") is None
    monkeypatch.syspath_prepend(mine.parent)
    mine.rename(mine.with_name("another_module_of_mine.py"))
    assert source_sha256("another_module_of_mine:Mine") == expected
    with pytest.raises(WorkloadError, match=f"cannot read {mine}: No such file"):
        source_sha256(f"{mine}:Mine")
    with pytest.raises(WorkloadError, match="no source file"):
        source_sha256("sys:path")


def test_the_contract_can_be_imported_without_jax_and_numpy() -> None:
    code = "import sys, gradbus.workloads.base; print(sorted({'jax', 'numpy', 'zmq'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
