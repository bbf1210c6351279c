"""Imports point down: what each module of nanok3 may import, read from its source.

A module without a row is one of those that people start (commands, batch, ...): it may import any
other, and none of the rows below may import it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT / "nanok3").with_suffix("").parts): path
    for path in sorted((ROOT / "nanok3").rglob("*.py"))
    if path.name != "__init__.py"
}

# module or package -> modules and packages of nanok3 that it may import
MAY_IMPORT: dict[str, set[str]] = {
    # files and numbers
    "config": {"config_check", "config_rules"},
    "config_check": {"config_rules"},
    "config_rules": set(),
    "safetensors_header": set(),
    "checkpoint_check": {"safetensors_header"},
    "checkpoint": {"checkpoint_check", "config"},
    "progress": set(),
    # the model
    "reference": {"reference"},
    "dsl": set(),
    "comm": {"comm", "dsl"},
    "kernels": {"kernels", "comm", "dsl", "reference"},  # its reference stands in a kernel's file
    "weight_table": {"config", "checkpoint", "reference"},
    "weights": {"config", "reference"},
    "random_weights": {"config", "weight_table", "reference"},
    "reuse": set(),
    "cache": {"config", "reuse"},
    "step": {"config", "reference"},
    "ops": {"reference", "kernels", "comm"},
    "model": {"config", "weights", "cache", "step", "ops", "reference"},
    "count": {"config", "weight_table", "weights", "cache", "step", "ops", "model"},
    "graph": set(),
    "mirror": set(),
    "decode": {"cache", "mirror", "sampling", "step"},
    "loop": {"decode", "graph", "request", "sampling", "step"},
    "workspaces": {"config"},
    "packing": {"config", "weight_table", "weights", "reference", "kernels"},
    "kernel_ops": {"config", "reference", "kernels", "ops", "packing", "workspaces"},
    "prefill_ops": {"config", "reference", "kernels", "ops", "packing", "workspaces"},
    "rank_weights": {"config", "weights", "reference", "random_weights", "packing"},
    "mega_sizes": {"config", "kernels", "workspaces"},
    "mega_ops": {
        *("config", "model", "graph", "kernels", "weights", "cache", "step", "mega_sizes"),
    },
    "kernel_ranks": {"comm", "config", "kernels", "ops"},
    "mega_ranks": {"cache", "comm", "config", "kernels", "mega_ops", "step", "weights"},
    "captured": {
        *("config", "model", "graph", "weights", "cache", "step", "ops", "kernel_ops", "mega_ops"),
        "reference",
    },
    "device": set(),
    "exits": set(),
    # ranks as processes
    "launch": {"comm", "exits"},
    "lockstep": {"comm", "exits", "request", "sampling"},
    "join": {"comm", "config", "launch", "lockstep", "plan", "spec"},
    # text and ids
    "uniform": set(),
    "sampling": {"uniform"},
    "tokenizer": set(),
    "messages": set(),
    "chat": {"messages"},
    "reply": set(),
    "channels": {"chat", "reply", "tokenizer"},
    "stop": set(),
    "tool_grammar": set(),
    "grammar": {"chat", "tokenizer", "tool_grammar"},
    "request": {"channels", "grammar", "reply", "sampling", "stop", "tokenizer"},
    # all of it
    "runner": {
        *("config", "weights", "cache", "step", "ops", "model", "graph", "captured", "decode"),
        *("loop", "prefill_ops", "sampling", "request", "comm"),
        *("spec", "spec_loop", "speculation"),
    },
    "plan": {
        *("config", "weight_table", "packing", "cache", "step", "decode", "workspaces"),
        *("runner", "device", "mega_sizes", "spec", "speculation"),
    },
    "cards": set(),
    "capacity": {"config", "cards", "count", "packing", "plan", "spec"},
    "spec": {  # knows no requests
        *("config", "config_check", "config_rules", "checkpoint", "weight_table", "reference"),
        *("sampling", "uniform", "cache", "step", "ops", "model", "weights", "spec", "comm"),
    },
    "spec_decode": {
        *("cache", "decode", "mirror", "reference", "sampling", "spec", "step", "uniform"),
    },
    "spec_steps": {"cache", "config", "graph", "sampling", "spec", "spec_decode", "step"},
    "spec_loop": {
        *("decode", "graph", "loop", "request", "sampling", "spec", "spec_decode", "spec_steps"),
    },
    "draft_packing": {"kernels", "packing", "spec"},
    "draft_ops": {"kernels", "packing", "reference", "spec"},
    "speculation": {
        *("cache", "config", "draft_ops", "draft_packing", "graph", "packing", "reference", "step"),
        "comm",
        *("spec", "spec_decode", "spec_steps", "spec_loop", "loop", "workspaces"),
    },
    "scheduler": {"cache", "loop", "request", "reuse", "runner"},
    "engine": {
        *("config", "checkpoint", "device", "plan", "progress", "cache", "runner", "scheduler"),
        *("weight_table", "weights", "packing"),
        *("sampling", "tokenizer", "messages", "chat", "channels", "grammar", "reply", "request"),
        *("spec", "speculation", "comm"),
        *("join", "lockstep"),
    },
}

CLI = {"cli", "cli_options", "cli_plan", "cli_bench"}  # the command line

# other packages -> the modules that may import them; any may import the standard library
OTHERS: dict[str, set[str]] = {
    "torch": {
        *("checkpoint", "reference", "dsl", "comm", "kernels", "weights", "cache", "step", "ops"),
        *("model", "count", "graph", "uniform", "sampling", "runner", "engine", "spec"),
        *("device", "captured", "kernel_ops", "prefill_ops", "rank_weights", "decode", "loop"),
        *("mirror", "spec_decode", "spec_steps", "draft_ops", "draft_packing"),
        "speculation",
        *("packing", "workspaces", "mega_ops", "bench_layer", "spec_loop"),
        *("weight_table", "random_weights", "grammar"),
        *("join", "launch"),
        *("commands", "bench", "bench_draft", "batch", "plan", "check_values", "trace"),
        *("record", "options", "replay", "loading"),
        *("kernel_ranks", "mega_ranks"),
    },
    "tokenizers": {"tokenizer"},
    "llguidance": {"grammar"},
    "click": CLI,
    "cutlass": {"dsl", "comm", "kernels"},
    "cuda": {"dsl", "comm", "kernels", "bench_layer"},
}


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it; `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def row_of(module: str) -> str:
    """`reference.kda` is in the row of `reference`."""
    return module.partition(".")[0]


def own_imports(path: Path) -> set[str]:
    """First parts of the names below nanok3."""
    return {n.split(".")[1] for n in imports_of(path) if n.startswith("nanok3.")}


def test_there_is_something_to_look_at() -> None:
    assert {"engine", "model", "ops", "reference.kda", "config"} <= MODULES.keys()
    assert own_imports(MODULES["runner"]) >= {"model", "cache", "ops"}  # `from nanok3 import model`
    missing = {row for row in MAY_IMPORT if row not in {row_of(m) for m in MODULES}}
    assert missing <= {"dsl", "comm", "kernels", "graph"}, "a row without a module"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    row = row_of(module)
    if row in MAY_IMPORT:
        wrong = own_imports(MODULES[module]) - MAY_IMPORT[row]
        assert not wrong, f"nanok3.{module} imports nanok3.{{{', '.join(sorted(wrong))}}}"
    elif row not in CLI:
        assert not CLI & own_imports(MODULES[module]), "the command line is nobody's library"


@pytest.mark.parametrize("module", MODULES)
def test_other_packages(module: str) -> None:
    for name in imports_of(MODULES[module]):
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names or package == "nanok3":
            continue
        assert package in OTHERS, f"nanok3.{module} imports {package}: is it a dependency?"
        assert row_of(module) in OTHERS[package], f"nanok3.{module} imports {package}"


def test_the_model_takes_only_records_from_below() -> None:
    """It computes nothing itself and knows no reading: names of types, by their capital letter."""
    imported = imports_of(MODULES["model"])
    names = {n.rpartition(".")[2] for n in imported if n.startswith("nanok3.")}
    assert all(name[0].isupper() and not name.isupper() for name in names), names


@pytest.mark.parametrize("module", MODULES)
def test_no_import_only_for_the_type_checker(module: str) -> None:
    """Needing one means that an arrow points the wrong way."""
    assert "TYPE_CHECKING" not in MODULES[module].read_text()


@pytest.mark.parametrize(
    "module, unwanted",
    [
        ("nanok3.config", {"torch", "numpy", "click", "tokenizers"}),
        ("nanok3.chat", {"torch", "numpy", "click", "tokenizers"}),
        ("nanok3.engine", {"cutlass", "click", "triton"}),  # torch itself brings cuda.bindings
        ("nanok3.cli", {"torch", "cutlass", "cuda", "triton"}),  # so that --help is quick
    ],
)
def test_what_importing_loads(module: str, unwanted: set[str]) -> None:
    if module == "nanok3.cli" and "cli" not in MODULES:
        pytest.skip("no command line yet")
    code = f"import sys, {module}; print(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not unwanted & set(done.stdout.split())
