"""The house stands as docs/architecture.md draws it: who imports whom, how large files get, what no file may name."""

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[2]
FACE = "face"  # src/torch_mlc: the lazy public names and __main__, above every room

# The rooms that each room may import besides itself.
MAY_IMPORT = {
    "ir": set(),
    "scheduler": {"ir"},
    "codegen": {"ir"},
    "runtime": {"ir", "scheduler", "codegen"},
    "dynamo_backend": {"ir", "scheduler", "codegen", "runtime", FACE},
    FACE: {"ir", "scheduler", "codegen", "runtime", "dynamo_backend"},
}
FOLDERS = {room: ROOT / room for room in MAY_IMPORT if room != FACE} | {FACE: ROOT / "src" / "torch_mlc"}
LIMIT, NOTE = 600, 400
FOLDER_LIMIT = 20


def sources() -> list[tuple[str, Path]]:
    return [(room, path) for room, folder in FOLDERS.items() for path in sorted(folder.rglob("*.py"))]


def package_of(room: str, path: Path) -> list[str]:
    """The installed package that holds a file, as parts: ir/passes/x.py is in torch_mlc.ir.passes."""
    base = ["torch_mlc"] if room == FACE else ["torch_mlc", room]
    return base + list(path.relative_to(FOLDERS[room]).parent.parts)


def imported_modules(node: ast.AST, package: list[str]) -> list[str]:
    """Absolute names of the modules that an import statement loads, with each name it takes from them."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        return [f"{module}.{alias.name}" for alias in node.names]
    return []


def room_of(module: str) -> str | None:
    """The room that a module is in; None where it is not ours."""
    parts = module.split(".")
    if parts[0] != "torch_mlc":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else FACE


def own_imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in imported_modules(node, package):
                if room_of(module) is not None:
                    yield node, module


def layer_faults(room: str, package: list[str], tree: ast.AST) -> list[str]:
    faults = []
    for node, module in own_imports(tree, package):
        target = room_of(module)
        if target != room and target not in MAY_IMPORT[room]:
            faults.append(f"line {node.lineno}: {room} may not import {module}")
    return faults


def local_import_faults(package: list[str], tree: ast.AST) -> list[str]:
    faults = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            faults |= {(node.lineno, module) for node, module in own_imports(function, package)}
    return [f"line {line}: {module} is imported inside a function" for line, module in sorted(faults)]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked() -> list[Path]:
    """Every file that is, or would be, in the repository; without git, every file of the source tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0 and listing.stdout:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    skipped = {".git", "build", "dist", "__pycache__"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


def test_every_room_is_there() -> None:
    assert {room for room, _ in sources()} == set(MAY_IMPORT)


@pytest.mark.parametrize(("room", "path"), sources(), ids=lambda value: shown(value) if isinstance(value, Path) else "")
def test_imports_follow_the_layers(room: str, path: Path) -> None:
    tree = ast.parse(path.read_text(), str(path))
    package = package_of(room, path)
    faults = layer_faults(room, package, tree) + local_import_faults(package, tree)
    assert not faults, f"{shown(path)}:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("room", "text", "refused"),
    [
        ("ir", "import torch_mlc.scheduler", True),
        ("ir", "from .. import runtime", True),
        ("ir", "from .expr import Load", False),
        ("scheduler", "from ..ir.expr import Load", False),
        ("scheduler", "from ..codegen import emit", True),
        ("codegen", "from torch_mlc.scheduler.schedule.schedule import Schedule", True),
        ("runtime", "from ..codegen.llvm import emit", False),
        ("runtime", "from ..dynamo_backend import backend", True),
        ("runtime", "from .. import __version__", True),
        ("dynamo_backend", "from ..runtime.options import Options", False),
        ("dynamo_backend", "from .. import __version__", False),
        ("ir", "import torch, sympy", False),
    ],
)
def test_the_layer_check_tells_right_from_wrong(room: str, text: str, refused: bool) -> None:
    assert bool(layer_faults(room, ["torch_mlc", room], ast.parse(text))) == refused


def test_the_local_import_check_tells_right_from_wrong() -> None:
    package = ["torch_mlc", "ir"]
    assert local_import_faults(package, ast.parse("def f():\n    from .expr import Load"))
    assert not local_import_faults(package, ast.parse("def f():\n    import triton"))
    assert not local_import_faults(package, ast.parse("if TYPE_CHECKING:\n    from .expr import Load"))


def test_files_stay_small() -> None:
    ours = [path for path in tracked() if path.suffix == ".py"]
    lengths = {shown(path): len(path.read_text().splitlines()) for path in ours}
    assert lengths
    long = {name: n for name, n in lengths.items() if n > NOTE}
    if long:
        listing = ", ".join(f"{name} ({n})" for name, n in sorted(long.items()))
        warnings.warn(f"above {NOTE} lines, split where there are two reasons to change: {listing}", stacklevel=1)
    assert not {name: n for name, n in long.items() if n > LIMIT}


def test_folders_stay_small() -> None:
    count = Counter(shown(path.parent) for path in tracked() if path.suffix == ".py" and path.name != "__init__.py")
    assert count
    assert not {name: n for name, n in count.items() if n > FOLDER_LIMIT}


def folder_edges() -> dict[str, set[str]]:
    """By folder of the rooms, the folders that its files import from, those above and below itself left out."""
    inside = [(room, path) for room, path in sources() if room != FACE]
    homes = {".".join(package_of(room, path)): path.parent for room, path in inside}
    modules = {f"{'.'.join(package_of(room, path))}.{path.stem}": path.parent for room, path in inside}
    edges: dict[str, set[str]] = {shown(folder): set() for folder in homes.values()}
    for room, path in inside:
        package = package_of(room, path)
        for _, name in own_imports(ast.parse(path.read_text()), package):
            where = modules.get(name) or modules.get(name.rpartition(".")[0]) or homes.get(name.rpartition(".")[0])
            if where is not None and not (where.is_relative_to(path.parent) or path.is_relative_to(where)):
                edges[shown(path.parent)].add(shown(where))
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    graph = networkx.DiGraph([(name, other) for name, others in edges.items() for other in others])
    return sorted(sorted(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1)


def test_folders_import_in_no_circle() -> None:
    edges = folder_edges()
    assert "ir/expr" in edges["codegen/llvm/memory"]
    assert not circles(edges)


def module_edges() -> dict[str, set[str]]:
    """By module, the modules of ours that it imports, for its types alone too."""
    packages = {path: package_of(room, path) for room, path in sources()}
    names = {".".join(p if f.stem == "__init__" else [*p, f.stem]): f for f, p in packages.items()}
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for full in imported_modules(node, packages[path]):
                module = full if full in names else full.rpartition(".")[0]
                if module in names and module != name:
                    found.setdefault(name, set()).add(module)
    return found


def test_modules_import_in_no_circle() -> None:
    edges = module_edges()
    assert "torch_mlc.scheduler.fusion.group" in edges["torch_mlc.scheduler.fusion.join"]
    assert not circles(edges)


def test_the_circle_check_tells_right_from_wrong() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})


def test_no_utils_module() -> None:
    assert not [shown(path) for path in tracked() if path.name in ("utils.py", "util.py")]


def test_no_file_names_one_machine_or_a_registry() -> None:
    hosts = "|".join(["py" + "pi" + r"\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org"])
    forbidden = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + rf"me)/\w|{hosts}")
    assert forbidden.search("see /wo" + "rk/x") and forbidden.search("--index-url py" + "pi.org/simple")
    faults = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        faults += [f"{shown(path)}: {found[0]}" for found in [forbidden.search(text)] if found]
    assert not faults, faults


def test_import_is_cheap_and_brings_no_compiler() -> None:
    """`import torch_mlc` by itself loads nothing heavy; one public name loads no Triton, LLVM or Dynamo either."""
    probe = (
        "import sys, typing; before = set(sys.modules); import torch_mlc\n"
        "brought = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert brought <= {'torch_mlc', 'collections'}, f'bare import is heavy: {brought}'\n"
        "torch_mlc.Options\n"
        "heavy = ('torch._dynamo', 'triton', 'llvmlite')\n"
        "assert not [m for m in heavy if m in sys.modules], 'Options is heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_public_names_load_and_a_wrong_one_says_which_there_are() -> None:
    import torch_mlc

    assert set(torch_mlc.__all__) <= set(dir(torch_mlc))
    assert torch_mlc.Options.__module__ == "torch_mlc.runtime.settings.options"
    with pytest.raises(AttributeError, match=r"public names are .*Options"):
        _ = torch_mlc.Option  # type: ignore[attr-defined]


def test_one_class_of_a_name() -> None:
    """A reader who meets a name has one place to look."""
    homes: dict[str, list[str]] = {}
    for _, path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}
