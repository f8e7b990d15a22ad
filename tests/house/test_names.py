"""Nothing is told by how a name begins or ends: what something is stands in a type, and names are for people. Who reads
parts of names that others gave is listed here, and the list only becomes shorter."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from .test_machine_figures import ROOMS, trees

FILES = "names of files and modules"
SYNTAX = "words of a language that is written or read here: a script, LLVM IR, settings"
TORCH = "names that torch, Python or Inductor made, which say nothing elsewhere"
ELF = "names of symbols that assemblers make, by the rules of ELF"
OWN = "names that the same file put together"
# How often each file does, and whose names those are.
TOLD = {
    "codegen/elf/format.py": (1, ELF),
    "codegen/host/python/words.py": (1, SYNTAX),
    "codegen/llvm/functions/functions.py": (1, SYNTAX),
    "codegen/llvm/text/builder.py": (3, SYNTAX),
    "dynamo_backend/aten_passes/joint_graph.py": (2, TORCH),
    "dynamo_backend/caches/aot_key.py": (1, TORCH),
    "dynamo_backend/cli/near.py": (1, SYNTAX),
    "dynamo_backend/demo/model.py": (1, OWN),
    "dynamo_backend/explaining/compiled_run.py": (1, OWN),
    "dynamo_backend/repeats/repeating.py": (1, OWN),
    "dynamo_backend/tracing/fake_device.py": (1, TORCH),
    "ir/text/parser_expr.py": (2, SYNTAX),
    "runtime/cache/cache.py": (1, FILES),
    "runtime/cache/foreign_code.py": (1, FILES),
    "runtime/cache/torch_sources.py": (1, FILES),
    "runtime/compile/nest_kernel.py": (1, SYNTAX),
    "runtime/host/executable.py": (1, TORCH),
    "runtime/triton/worker_process.py": (1, FILES),
}
PARTS = {"startswith", "endswith", "removeprefix", "removesuffix"}
NAMES = {"name", "var", "buffer"}


def read_parts(tree: ast.Module) -> int:
    """How often a module looks at a part of a name."""
    count = 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=of)) if method in PARTS:
                count += _is_name(of)
            case ast.Subscript(value=of, slice=ast.Slice() | ast.Constant() | ast.UnaryOp(), ctx=ast.Load()):
                count += _is_name(of)
            case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()], comparators=[of]):
                count += _is_name(of)
    return count


def _is_name(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in NAMES
        case ast.Call(func=ast.Name(id="str"), args=[of]):
            return _is_name(of)
    return False


def test_no_meaning_is_read_from_a_part_of_a_name() -> None:
    found = Counter({name: read_parts(tree) for name, tree in trees(*ROOMS)})
    assert {name: n for name, n in found.items() if n} == {name: n for name, (n, _) in TOLD.items()}, (
        "give it a type: a field, a role, a kind"
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a.var.name.startswith('r')", 1), ("kept = [a.var.name[0] for a in axes]", 1), ("int(s.name[1:])", 1),
        ("'tangents' in str(n.name)", 1), ("ld.buffer.removeprefix('scores of ')", 1), ("str(var).endswith('_')", 1),
        ("name[-1] != '_'", 1), ("a.dim is DimKind.INNER", 0), ("b.name == name", 0), ("names[0]", 0),
        ("target.startswith('aten::')", 0), ("sizes[var]", 0), ("shapes[b.name]", 0), ("name in taken", 0),
    ],
)  # fmt: skip
def test_what_reads_a_part_is_found(text: str, count: int) -> None:
    assert read_parts(ast.parse(text)) == count
