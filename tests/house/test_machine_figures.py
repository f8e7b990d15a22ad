"""Figures of machines are in ``ir/machine.py`` and ``scheduler/cost``; kinds of devices are told apart where a target
is chosen. What is elsewhere is listed here, and a list only becomes shorter."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ir", "scheduler", "codegen", "runtime", "dynamo_backend")
KINDS = {"cpu", "cuda", "hip"}


def trees(*rooms: str) -> Iterator[tuple[str, ast.Module]]:
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


# --- figures ----------------------------------------------------------------------------------------------------------

# Why a number that a module of ``scheduler`` names, outside of ``cost``, is no figure of a machine.
TEXT = "the size of what is written, compiled or looked at: nodes, copies, steps of a search"
FORM = "how numbers, names or memory are made up, whatever runs them"
FIRST = "what a rule tries first: a parameter that tuning varies"
RATIO = "how far a shape is from another one"
ERROR = "how far sums may err"
ALLOWED = {
    "calls/overwrite.py": {"LEAST_OWNED": "what it takes Python, on every machine, to see who holds a tensor"},
    "facts/contraction.py": {
        "COLUMNS": "columns of a tile, which facts about products name; facts cannot ask costs",
    },
    "facts/prologues.py": {
        "INLINE_FLOPS": TEXT, "INLINE_NODES": TEXT, "WIDE": "bytes of the widest copy, of every machine",
    },
    "facts/dots.py": dict.fromkeys(("_DEPTH", "_LANES"), "the least that any declared instruction takes"),
    "primitives/analysis/dots.py": {"_MOST": FORM},
    "facts/digits.py": {"LEAST_STEP": RATIO, "MOST_STEPS": TEXT},
    "facts/fusion_nodes.py": dict.fromkeys(
        ("INLINE_FLOPS", "INLINE_NODES", "CONCAT_NODES", "SUBSTITUTION_DEPTH", "CHEAP_FLOPS", "LONG_ROW"), TEXT),
    "facts/packed_operands.py": {"REUSED": RATIO},
    "functions/generalise.py": {"_LARGEST_DIVISOR": FORM},
    "functions/unify.py": {"MOST": TEXT, "_LARGEST_DIVISOR": FORM},
    "fusion/fuse.py": dict.fromkeys(("TINY_ELEMENTS", "MAX_TINY", "MOST_TRIED", "MOST_TOLD"), TEXT),
    "fusion/join.py": {"MAX_NODES": TEXT},
    "fusion/prologues.py": {"MOST_OPERANDS": TEXT},
    "fusion/rematerialize.py": {"MAX_LOADS": TEXT},
    "fusion/scatter.py": {"MOST_READ": RATIO},
    "fusion/chain.py": {"MAX_EPILOGUE": TEXT},
    "passes/attention/attention_match.py": {"MAX_NODES": TEXT},
    "passes/convolution/convert_layouts.py": {"RANK": FORM},
    "passes/products/operands.py": {"MAX_APART": TEXT},
    "passes/products/chain_elements.py": {"MAX_NODES": TEXT},
    "passes/products/stream_k.py": {"MOST_WRITTEN": TEXT},
    "passes/products/chain_choice.py": {"MIN_ROWS": RATIO},
    "passes/products/chain_products.py": {"MIN_SHARED": TEXT},
    "passes/reduction/rewrite_logsumexp.py": {"DEPTH": TEXT},
    "passes/reduction/shift_scans.py": {"NEAR": RATIO},
    "passes/reduction/split_reductions.py": {"ALIGNMENT": FORM},
    "passes/reduction/unroll_reductions.py": {"MAX_ELEMENTS": TEXT, "MAX_NODES": TEXT},
    "passes/substitute/einsum.py": {"MOST_FACTORS": TEXT},
    "passes/substitute/joined.py": {"MOST_COPIED": TEXT},
    "passes/substitute/parts.py": {"LEAST_NODES": TEXT, "MOST_NODES": TEXT},
    "passes/substitute/search.py": {
        "RELAXED": RATIO, "MOST_GRAPHS": TEXT, "MOST_FUSED": TEXT, "FUSED_NODES": TEXT,
    },
    "passes/substitute/terms.py": {"MOST_TERMS": TEXT},
    "primitives/loops/kind.py": {"MAX_UNROLL": TEXT, "MAX_LANES": TEXT},
    "rules/contraction.py": {"MOST_PARTS": TEXT},
    "rules/cpu/common.py": {"UNROLLS": FIRST, "LONG": ERROR, "SHORT": RATIO},
    "rules/cpu/concat.py": {"LONG": RATIO, "HEAVY": RATIO, "MOST_PARTS": TEXT, "MOST_NODES": TEXT},
    "rules/cpu/contraction.py": {"MOST_PACKED": TEXT},
    "rules/cpu/cross.py": {"PIECE": ERROR},
    "rules/cpu/scatter.py": {"_FEATURES": TEXT, "_COPIES": TEXT, "_WRITTEN": TEXT},
    "rules/cpu/split.py": {"INLINE": TEXT, "PIECE": ERROR, "MAX_PARTIALS": TEXT},
    "rules/gpu/attention.py": {"STAGES": FIRST},
    "rules/gpu/attention_bias.py": {"STAGES": FIRST},
    "rules/gpu/attention_gradients.py": {"STAGES": FIRST},
    "rules/gpu/contraction.py": {"VARIED": TEXT},
    "rules/gpu/copies.py": {"ROW_BYTES": FORM, "MOST_DIMENSIONS": FORM},
    "rules/gpu/cross.py": {"PARTS": FIRST},
    "rules/gpu/fit.py": {"WIDE": FORM, "HALF": FORM},
    "decisions/decide.py": {"USUAL_BANDWIDTH": "puts decisions in order of which no time is known; decides none"},
    "decisions/keys.py": {"BACK": TEXT, "DIGITS": FORM},
    "regions/choose.py": {"STEP": RATIO},
    "regions/proof.py": {"MOST_RESIDUES": TEXT, "MOST_CASES": TEXT},
    "schedule/overrides.py": {"SHORT": FORM, "LEAST": FORM},
    "tuning/database/database.py": {"BUSY_SECONDS": TEXT},
    "tuning/database/decisions.py": {"MAX_CHOSEN": TEXT},
    "tuning/database/rows.py": dict.fromkeys(("MAX_DEPTH", "MAX_ITEMS", "MAX_SIZE", "MAX_STEPS", "MAX_TRACE"), TEXT),
    "tuning/database/schema.py": {"SCHEMA": FORM},
    "tuning/database/sharing.py": dict.fromkeys(
        ("MAX_NAMED", "MAX_LINE", "MAX_DRAFT", "MAX_FEATURES", "_CHUNK"), TEXT,
    ),
    "tuning/database/verify.py": {"_MAX_TEXT": TEXT},
    "tuning/database/queries.py": {"_GAIN": TEXT, "MOST_SIMILAR": TEXT},
    "tuning/features.py": {"FEATURES_VERSION": FORM, "_ALL_WRITTEN": FORM},
    "tuning/loop_features.py": {"BUFFERS": TEXT, "DEPTHS": TEXT, "_FAR": FORM},
    "tuning/order.py": {"LARGEST_ACCUMULATORS": "what the emitter of CPUs keeps: a test compares them"},
    "tuning/sites.py": dict.fromkeys(
        ("REGISTERS", "ELEMENTS", "CHUNKS", "TILES", "JAMS", "UNROLLS", "COUNTS", "TIMES", "FEW", "WRITTEN"), TEXT),
    "tuning/space.py": dict.fromkeys(("MAX_POINTS", "FIRST_RULE", "ANOTHER_EDIT", "MOST_EDITS", "_KEPT"), TEXT),
    "tuning/strategies.py": dict.fromkeys(
        ("MUTANTS", "REPLAYED", "BY_CHANCE", "PARENTS", "CROSSED", "PATIENCE", "BEAM", "NEIGHBOURS"), TEXT),
    "tuning/flips.py": dict.fromkeys(
        ("MOST_DECISIONS", "HOPELESS", "MOST_RACED", "TOGETHER", "PLANNING"), TEXT),
    "tuning/loop_times.py": {
        "WAIT": "nanoseconds of a memory, of every GPU: it tells sizes apart, and no time",
        **dict.fromkeys(("VECTOR", "VECTOR_ITEM"), "the vectors by which rates of CPUs are counted"),
    },
    "tuning/model_choice.py": {"DRAFTS": TEXT, "BASES": TEXT, "REPLAYS": TEXT, "SEEDS": TEXT},
    "tuning/race.py": {"CONFIDENCE": TEXT, "LEAST_GAIN": TEXT, "NOISES": TEXT, "TOGETHER": TEXT},
    "tuning/search.py": dict.fromkeys(
        (
            "FIRST_ROUNDS", "MORE_ROUNDS", "FAR_BEHIND", "FINALISTS", "FINAL_ROUNDS", "AT_A_TIME", "MOST_ASKED",
            "PATIENCE", "FIRST_PROMISE", "KEPT_PROMISE",
        ), TEXT,
    ),
    "tuning/seeds.py": {"MOST_SEEDS": TEXT, "LOOKED_AT": TEXT},
    "tuning/tune.py": {"LAST_RACE": TEXT, "BEGUN_CHEAPLY": TEXT},
}  # fmt: skip


def figures(tree: ast.Module) -> set[str]:
    """The names in capitals that a module gives to numbers, to tuples or ranges of them."""
    found: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        value = getattr(node, "value", None)
        if not targets or not _is_number(value):
            continue
        found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and n.id.isupper()}
    return found


def _is_number(value: ast.AST | None) -> bool:
    match value:
        case ast.Constant():
            return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
        case ast.UnaryOp():
            return _is_number(value.operand)
        case ast.BinOp():
            return _is_number(value.left) and _is_number(value.right)
        case ast.Tuple():
            return bool(value.elts) and all(_is_number(e) for e in value.elts)
        case ast.Call(func=ast.Name(id="range")):
            return True
    return False


def test_figures_of_machines_are_in_one_place() -> None:
    found = {name.removeprefix("scheduler/"): figures(tree) for name, tree in trees("scheduler")}
    elsewhere = {name: names for name, names in found.items() if names and not name.startswith("cost/")}
    assert elsewhere == {name: set(reasons) for name, reasons in ALLOWED.items()}
    assert sum(map(len, found.values())) - sum(map(len, elsewhere.values())) > 60


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("PROGRAMS = 512", {"PROGRAMS"}), ("BYTE, BLAS = 1 / 14, 1 / 73", {"BYTE", "BLAS"}), ("TILES: int = 4 << 2",
        {"TILES"}), ("WIDTHS = range(16, 257)", {"WIDTHS"}), ("NAME = 'x'", set()), ("def f():\n    SMALL = 3", set()),
    ],
)  # fmt: skip
def test_figures_are_found(text: str, names: set[str]) -> None:
    assert figures(ast.parse(text)) == names


# --- kinds of devices -------------------------------------------------------------------------------------------------

# Files in which a target is chosen, loaded or compiled for: there is a way for each kind.
CHOSEN = (
    "ir/target.py",
    "ir/machine.py",
    "scheduler/cost/",
    "scheduler/rules/__init__.py",
    "scheduler/rules/registry.py",
    "scheduler/tuning/loop_times.py",
    "scheduler/tuning/sites.py",
    "codegen/",
    "runtime/",
    "dynamo_backend/compiling/",
    "dynamo_backend/caches/",
    "dynamo_backend/cli/",
    "dynamo_backend/entry/modules.py",
    "dynamo_backend/export/targets.py",
    "dynamo_backend/verify/kernel_run.py",
)
# How often others tell them apart. A number only becomes smaller.
TOLD_APART = {
    "dynamo_backend/aten_passes/attention/joint.py": 1,
    "dynamo_backend/converters/index/adaptive_pooling.py": 1,
    "dynamo_backend/converters/index/ranks.py": 1,
    "dynamo_backend/converters/index/segments.py": 1,
    "dynamo_backend/converters/linear/attention.py": 1,
    "dynamo_backend/converters/math/elementwise.py": 1,  # eager rounds numbers on CPUs alone
    "dynamo_backend/aten_passes/rounding/eager_steps.py": 1,  # eager rounds within ops on CPUs alone
    "dynamo_backend/converters/random/replays.py": 2,
    "dynamo_backend/converters/reduce/batch_norm.py": 1,
    "dynamo_backend/converters/reduce/moments.py": 2,
    "dynamo_backend/reports/traffic.py": 1,  # of whom the second-level cache is
    "dynamo_backend/conformance/cases/subclasses.py": 1,
    "dynamo_backend/converters/refused_types.py": 1,
    "dynamo_backend/converters/scan/scans.py": 2,
    "dynamo_backend/demo/command.py": 1,
    "dynamo_backend/generate/exported.py": 1,  # the program that runs a model hands over arrays of the host alone
    "dynamo_backend/importing/decompositions.py": 4,
    "dynamo_backend/importing/flex_attention.py": 1,
    "dynamo_backend/locking/graph_lock.py": 1,
    "dynamo_backend/tracing/fake_device.py": 1,
    "dynamo_backend/variants/times.py": 2,
    "ir/text/printer.py": 1,
    "scheduler/facts/fusion_nodes.py": 1,
    "scheduler/passes/attention/plain_attention.py": 1,
}


def kind_tests(tree: ast.Module) -> int:
    """How often a module asks which kind of device or target something is."""
    count = 0
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="is_gpu" | "is_amd"):
                count += 1
            case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value=str() as v)]):
                count += v in KINDS
            case ast.Compare():
                sides = [node.left, *node.comparators]
                count += any(isinstance(s, ast.Constant) and s.value in KINDS for s in sides)
    return count


def test_kinds_of_devices_are_told_apart_where_a_target_is_chosen() -> None:
    found = Counter({name: kind_tests(tree) for name, tree in trees(*ROOMS) if not name.startswith(CHOSEN)})
    assert {name: n for name, n in found.items() if n} == TOLD_APART, "ask for a Capability, or for a cost"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("target.is_gpu", 1), ("device.startswith('cpu')", 1), ("kind == 'hip' and arch == 'x'", 1),
        ("can(target, Capability.SPLIT_ROWS)", 0), ("name.startswith('cp')", 0),
    ],
)  # fmt: skip
def test_kind_tests_are_found(text: str, count: int) -> None:
    assert kind_tests(ast.parse(text)) == count
