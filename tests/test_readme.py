"""The README's tables are of this program: commands, options and exit codes, tests and files."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from nanok3.cli import cli
from nanok3.exits import EXIT_CODES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands(group: click.Group, before: str = "nanok3") -> list[str]:
    """Those that can be run, groups left out."""
    found = []
    for name, command in group.commands.items():
        whole = f"{before} {name}"
        found += commands(command, whole) if isinstance(command, click.Group) else [whole]
    return found


def test_every_command_has_a_row() -> None:
    table = README.partition("## Commands")[2].partition("\n## ")[0]
    rows = [
        line.partition(" | ")[0] for line in table.splitlines() if line.startswith("| `nanok3 ")
    ]
    named = [
        re.sub(r" (\[?[A-Z][^`,]*)", "", n) for row in rows for n in re.findall("`(.*?)`", row)
    ]
    assert sorted(named) == sorted(commands(cli))


def test_every_exit_code_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", README, re.MULTILINE)
    assert {int(code): text for code, text in rows} == EXIT_CODES


def test_every_option_that_is_named_exists() -> None:
    known = {"--help"}
    for name in commands(cli):
        command: click.Command = cli
        for part in name.split()[1:]:
            assert isinstance(command, click.Group)
            command = command.commands[part]
        known |= {option for p in command.params for option in p.opts}
    text = README.partition("## Commands")[2].partition("## The tree")[0]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tests|scripts|docs)/[^` ]+)", README)))
)
def test_every_file_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_guarantee_has_its_tests() -> None:
    table = README.partition("## Guarantees")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        held_by = row.split(" | ")[-1]
        files = re.findall(r"`(tests/test_\w+\.py)`", held_by)
        assert files, row
        assert all("def test_" in (ROOT / file).read_text() for file in files)
