"""The rules of docs/design.md on which module may import which. A rule that nobody checks decays.

Imports are read from the source, those inside functions too; only `if TYPE_CHECKING:` blocks do not count.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "batch_inference"
ROOT = Path(__file__).parents[2] / PACKAGE

# Each part of the package (a module or a subpackage) and the parts it may import. Parts stand below those they import.
ALLOWED = {
    # values and helpers without further needs
    "errors": "",
    "machine": "",
    "processes": "errors",
    "policy": "",
    "isolation": "errors",
    "deaths": "errors",
    "watching": "",
    "board": "",
    "speedups": "",  # what is in C instead
    "counting": "board speedups",
    "awake": "speedups",
    "statistics": "board",
    "testing": "",
    "buffers": "",
    "tensors": "buffers errors speedups",
    # three that do not know each other: policy above, and
    "batcher": "buffers errors tensors",
    "by_value": "",
    "transport": "by_value errors speedups tensors",
    # what goes along to the other processes
    "options": "board errors policy",
    "description": "options",
    "payload": "by_value errors options",
    "logs": "transport",
    # the supervisor process
    "crew": "transport watching",
    "reloading": "crew transport",
    "supervisor": "board crew description errors logs machine payload processes reloading transport watching",
    # the worker process
    "waiting": "batcher errors policy speedups transport",
    "ahead": "batcher buffers tensors waiting",
    "running": "ahead batcher board counting errors isolation speedups tensors transport waiting",
    "worker": (
        "awake batcher board buffers counting errors logs machine options payload policy processes running tensors "
        "transport waiting"
    ),
    # the application's process
    "link": "board deaths errors logs machine options payload processes statistics transport",
    "ledger": "board speedups transport",
    "gate": "board counting ledger speedups transport",
    "room": "board errors gate ledger transport",
    "client": "awake board deaths errors ledger room statistics transport",
    "futures": "client errors transport",  # submit
    "awaited": "speedups transport",
    "loops": "awaited client errors speedups transport",  # apredict
    "local": "board errors link options payload statistics transport worker",  # num_workers=0: all in one process
    "host": (
        "batcher board client description errors futures link local loops machine options payload statistics transport"
    ),
    "": "batcher errors host options policy statistics",  # the package itself
}

# Imports inside functions that the table does not allow, and why they are there.
ALLOWED_WITHIN_FUNCTIONS = {
    ("options", "batcher"): "checks the batcher and makes the default one; the supervisor must not load numpy",
}

# The third-party modules that the library imports; torch is optional.
DEPENDENCIES = {"numpy", "cloudpickle", "psutil"}


@dataclass(frozen=True)
class Import:
    importer: str  # "batch_inference.transport.codec"
    imported: str
    line: int
    within_function: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_files() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = module_files()
TREES = {module: ast.parse(path.read_text("utf-8"), str(path)) for module, path in FILES.items()}


def statements(node: ast.AST, within_function: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, within_function
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from statements(ast.Module(child.orelse, []), within_function)
        else:
            inside = within_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from statements(child, inside)


def targets(module: str, statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
        return
    base = statement.module or ""
    if statement.level:
        package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
        base = ".".join(package[: len(package) - statement.level + 1] + ([base] if base else []))
    for alias in statement.names:  # `from package import name`: a module of that name, or something in the package
        name = f"{base}.{alias.name}"
        yield name if name in FILES else base


IMPORTS = [
    Import(module, target, statement.lineno, within)
    for module, tree in TREES.items()
    for statement, within in statements(tree)
    for target in targets(module, statement)
]
INTERNAL = [found for found in IMPORTS if found.imported.split(".")[0] == PACKAGE]


def part(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def test_every_module_has_its_place() -> None:
    assert len(FILES) > 10
    missing = {part(module) for module in FILES} - set(ALLOWED)
    assert not missing, f"say in ALLOWED, and in docs/design.md, what {missing} may import"


def test_arrows_point_down() -> None:
    broken = []
    for found in INTERNAL:
        importer, imported = part(found.importer), part(found.imported)
        excused = found.within_function and (importer, imported) in ALLOWED_WITHIN_FUNCTIONS
        if importer != imported and imported not in ALLOWED[importer].split() and not excused:
            broken.append(str(found))
    assert not broken, "\n".join(broken)


def test_excuses_are_still_needed() -> None:
    used = {(part(found.importer), part(found.imported)) for found in INTERNAL if found.within_function}
    assert set(ALLOWED_WITHIN_FUNCTIONS) <= used


def test_the_table_itself_has_no_circle_and_keeps_apart_what_must_not_know_each_other() -> None:
    ranks = {name: rank for rank, name in enumerate(ALLOWED)}
    assert all(ranks[below] < ranks[name] for name, allowed in ALLOWED.items() for below in allowed.split())
    strangers = [("worker", "client"), ("worker", "link"), ("worker", "supervisor"), ("client", "supervisor")]
    strangers += [("policy", "batcher"), ("policy", "transport"), ("batcher", "transport")]
    for one, other in strangers:
        assert other not in ALLOWED[one].split() and one not in ALLOWED[other].split()


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: {found.imported for found in INTERNAL if found.importer == module} for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "circle: " + " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_third_party_imports_are_declared_dependencies() -> None:
    stranger = [
        str(found)
        for found in IMPORTS
        if found.imported.split(".")[0] not in sys.stdlib_module_names | DEPENDENCIES | {PACKAGE, "torch"}
    ]
    assert not stranger, "\n".join(stranger)
    declared = (ROOT.parent / "pyproject.toml").read_text("utf-8")
    assert all(f'"{name}>=' in declared for name in DEPENDENCIES)


def test_only_tensors_names_a_framework() -> None:
    named = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            name = {ast.Name: "id", ast.alias: "name", ast.Constant: "value"}.get(type(node))
            value = getattr(node, name) if name else None
            if isinstance(value, str) and (value == "torch" or value.startswith("torch.")):
                named.append((module, getattr(node, "lineno", 0)))
    assert {module for module, _ in named} <= {f"{PACKAGE}.tensors"}, named


def test_the_supervisor_loads_neither_numpy_nor_what_could_unpickle() -> None:
    early = [found for found in IMPORTS if not found.within_function]
    reached, todo = set(), [f"{PACKAGE}.supervisor"]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            todo += [found.imported for found in early if found.importer == module]
    assert f"{PACKAGE}.supervisor" in FILES
    assert not reached & {"numpy", "cloudpickle", "pickle"}, sorted(
        name for name in reached if name.startswith(PACKAGE)
    )
    loaded = modules_after(f"import {PACKAGE}.supervisor", "-S")
    assert not loaded & {"numpy", "pickle"}
    large = {"dataclasses", "inspect", "logging", "traceback", f"{PACKAGE}.host", f"{PACKAGE}.options"}
    assert not loaded & large, "what each host would keep in memory once more, and wait for at its start"


def run(code: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT.parent).stdout


def modules_after(statement: str, *flags: str) -> set[str]:
    return set(run(f"import sys; {statement}; print(*sys.modules)", *flags).split())


ALL = f"from {PACKAGE} import *"  # the package imports most of its names when they are first used


def test_all_names_of_the_package_can_be_had_and_no_others() -> None:
    code = f"import {PACKAGE} as p; [getattr(p, name) for name in dir(p)]; assert {{*p.__all__}} <= {{*dir(p)}}; p.no"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run(code)
    assert f"AttributeError: module '{PACKAGE}' has no attribute 'no'" in failed.value.stderr


def test_importing_the_library_loads_nothing_that_may_not_be_needed() -> None:
    loaded = modules_after(ALL)
    heavy = {"torch", "asyncio", "psutil", "multiprocessing", "flask", "fastapi", "redis", "ray"}
    assert not loaded & heavy
    assert not {name for name in loaded if name.startswith((f"{PACKAGE}.frontends", f"{PACKAGE}.cli"))}
    assert f"{PACKAGE}.worker" not in loaded and f"{PACKAGE}.supervisor" not in loaded


@pytest.mark.slow
def test_importing_the_library_takes_hardly_longer_than_numpy() -> None:
    def seconds(statement: str) -> float:
        return float(run(f"from time import perf_counter as now; t = now(); {statement}; print(now() - t)"))

    def ratio() -> float:
        pairs = [(seconds(ALL), seconds("import numpy")) for _ in range(7)]  # in turn, so that both see the same noise
        ours, numpys = zip(*pairs, strict=True)
        return statistics.median(ours) / statistics.median(numpys)

    ratio()  # fills the caches
    ratios = []
    for _ in range(4):  # a busy machine may spoil one
        ratios.append(ratio())
        if ratios[-1] <= 1.4:
            return
    raise AssertionError(f"import {PACKAGE} takes {ratios} times as long as import numpy")
