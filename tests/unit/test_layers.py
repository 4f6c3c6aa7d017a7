"""The imports, read from the source, are those of this drawing: what is not drawn is not imported.

scripts --> gradbus --+--> ps ------+--> bus
                      +--> worker --+
                      +--> gradbus.workloads   (imports none of the others)
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARROWS = {
    "bus": {"bus"},
    "ps": {"ps", "bus"},
    "worker": {"worker", "bus"},
    "gradbus.workloads": {"gradbus.workloads"},
    "gradbus": {"gradbus", "gradbus.workloads", "ps", "worker", "bus"},
}
JAX = {"jax", "optax"}
THIRD_PARTY = {  # msgspec may be used anywhere, numpy wherever JAX may; all others only where they are named
    "bus.codec": {"numpy"},
    "bus.finite": {"numpy"},
    "bus.layout": {"numpy"},
    "bus.memory": {"numpy"},
    "bus.shm": {"numpy"},
    "bus.sockets": {"zmq"},
    "ps.checkpoint": {"numpy", "safetensors", "ml_dtypes"},
    "ps.advance": {"numpy"},
    "ps.elementwise": {"numpy", "jax", "optax"},
    "ps.norms": {"numpy"},
    "ps.optimizers": {"numpy", "jax", "optax"},
    "ps.reduce": {"numpy"},
    "ps.stretches": {"numpy", "jax", "optax"},
    "ps.update": {"numpy", "jax", "optax"},
    "worker.batches": {"numpy"},
    "worker.compute": {"numpy", "jax"},
    "worker.executor": {"numpy"},
    "gradbus.audit": {"numpy"},
    "gradbus.build": {"numpy", "jax"},
    "gradbus.cli": {"typer"},
    "gradbus.evaluate": {"numpy", "jax"},
    "gradbus.launch": {"rich"},
    "gradbus.records": {"tensorboardX"},
    "gradbus.settings": {"omegaconf"},
    "gradbus.view": {"rich"},
    "gradbus.yaml_text": {"yaml"},
    "gradbus.workloads": {"numpy", "jax", "pooch"},
}
PURE = {  # they decide: no clock, no chance, no files, no network, and nothing that has them
    "bus.errors",
    "bus.faults",
    "bus.messages",
    "bus.transport",
    "bus.tree",
    "ps.actions",
    "ps.machine",
    "ps.membership",
    "ps.patience",
    "ps.plan",
    "ps.rounds",
    "worker.machine",
    "gradbus.incidents",
    "gradbus.policy",
}
IMPURE_STDLIB = {
    "asyncio",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
}
WITHOUT_JAX_AND_ZMQ = {  # the launcher; test_cli.py sees it from outside, too
    "gradbus.cli",
    "gradbus.explain",
    "gradbus.launch",
    "gradbus.policy",
    "gradbus.process",
    "gradbus.records",
    "gradbus.report",
    "gradbus.settings",
    "gradbus.supervise",
    "gradbus.view",
}


def read(path: Path) -> tuple[set[str], set[str]]:
    """All modules that a file imports, and those which it imports while it is itself imported."""
    tree = ast.parse(path.read_text())
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    late = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)] + checked
    lazily = {child for node in late for child in ast.walk(node)}
    everything, at_import = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                found = {alias.name for alias in names}
            case ast.ImportFrom(module, names, 0):
                found = {f"{module}.{alias.name}" if f"{module}.{alias.name}" in MODULES else module for alias in names}
            case ast.ImportFrom():
                pytest.fail(f"{path}: a relative import")
            case _:
                continue
        everything |= found
        if node not in lazily:
            at_import |= found
    return everything, at_import


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for top in ("bus", "ps", "worker", "gradbus") for path in (ROOT / top).rglob("*.py")}
IMPORTS = {name: read(path) for name, path in MODULES.items()}


def package(module: str) -> str:
    return "gradbus.workloads" if module.startswith("gradbus.workloads") else module.partition(".")[0]


def closure(module: str) -> set[str]:
    """What importing a module imports of ours, packages included."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in IMPORTS and name not in seen:
            seen.add(name)
            todo += [*IMPORTS[name][1], *(".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1))]
    return seen


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows(module):
    everything, _ = IMPORTS[module]
    ours = {
        name for name in everything if name.partition(".")[0] in ("bus", "ps", "worker", "gradbus", "scripts", "tests")
    }
    strangers = {name for name in ours if package(name) not in ARROWS[package(module)]}
    assert not strangers, f"{module} may import {sorted(ARROWS[package(module)])}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_third_party(module):
    everything, _ = IMPORTS[module]
    tops = {name.partition(".")[0] for name in everything}
    third = tops - sys.stdlib_module_names - {"bus", "ps", "worker", "gradbus", "msgspec"}
    allowed = THIRD_PARTY.get(module, THIRD_PARTY.get(package(module), set()) if "workloads" in module else set())
    assert third <= allowed


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_have_nothing_to_do_with_the_world(module):
    for name in closure(module):
        if "." not in name:  # a package's own docstring; gradbus is the public API, which looks up its version
            continue
        assert name in PURE, f"{module} imports {name}"
        tops = {imported.partition(".")[0] for imported in IMPORTS[name][0]}
        assert not tops & IMPURE_STDLIB
        assert tops - sys.stdlib_module_names <= {"bus", "ps", "worker", "gradbus", "msgspec"}


@pytest.mark.parametrize("module", sorted(WITHOUT_JAX_AND_ZMQ))
def test_the_launcher_is_free_of_jax_and_zeromq(module):
    for name in closure(module):
        assert not {imported.partition(".")[0] for imported in IMPORTS[name][1]} & {*JAX, "zmq", "numpy"}, name


@pytest.mark.parametrize("name", ["bus", "ps", "worker", "gradbus.workloads"])
def test_a_package_is_a_docstring(name):
    (only,) = ast.parse(MODULES[name].read_text()).body
    assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)


def test_only_sockets_knows_zeromq():
    assert [name for name, (everything, _) in IMPORTS.items() if any(m.startswith("zmq") for m in everything)] == [
        "bus.sockets"
    ]


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "dill", "multiprocessing", "marshal", "shelve"])
def test_nothing_is_pickled_or_forked(module):
    assert not [name for name, (everything, _) in IMPORTS.items() if module in everything]
