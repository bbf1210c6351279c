"""The command line of `nanok3 plan` and `nanok3 check`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from nanok3.cards import CARDS, DEFAULT
from nanok3.cli_options import EPILOG, FILE
from nanok3.config import TP_SIZES


@click.command(epilog=EPILOG)
@click.option("--model", metavar="DIR|k3", help="A K3 checkpoint; k3 needs no files; else k3-mini.")
@click.option(
    "--gpus", type=click.Choice([str(n) for n in TP_SIZES]), default="1", show_default=True
)
@click.option("--context", type=click.IntRange(1), help="Tokens of prompt and reply of a request.")
@click.option("--requests", type=click.IntRange(1), default=8, show_default=True, help="At once.")
@click.option(
    "--gpu",
    type=click.Choice(list(CARDS)),
    default=DEFAULT,
    show_default=True,
    help="Which one: its memory and the speed of it.",
)
@click.option(
    "--gpu-memory",
    callback=lambda context, option, text: None if text is None else read_bytes(text),
    help="Instead of that GPU's: bytes, or with a unit: GB, GiB.",
)
@click.option("--draft", type=FILE, metavar="DIR", help="A DSpark draft, of which config.json.")
@click.option("--json", "as_json", is_flag=True, help="The plan as one JSON object.")
def plan(
    model: str | None,
    gpus: str,
    context: int | None,
    requests: int,
    gpu: str,
    gpu_memory: int | None,
    draft: Path | None,
    as_json: bool,
) -> int:
    """What each GPU has to hold and a step to read, and whether it fits. Needs no GPU.

    Of a model's directory it reads config.json, and the headers of the weights where they are
    there. Exit code 0 whether it fits or not.
    """
    from nanok3 import commands_plan

    return commands_plan.plan(
        model,
        gpus=int(gpus),
        context=context,
        requests=requests,
        gpu=gpu,
        gpu_memory=gpu_memory,
        draft=draft,
        as_json=as_json,
    )


@click.command(epilog=EPILOG)
@click.option("--model", type=FILE, metavar="DIR", help="A K3 checkpoint; else the packaged one.")
@click.option("--draft", type=FILE, metavar="DIR", help="A DSpark draft of it, checked besides.")
@click.option(
    "--hash", "with_hash", is_flag=True, help="Read everything; sha256 of files, content."
)
@click.option(
    "--state",
    type=FILE,
    help="Keeps the hashes of finished files, to go on; else nanok3-check.jsonl, here.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def check(
    model: Path | None, draft: Path | None, with_hash: bool, state: Path | None, as_json: bool
) -> int:
    """Whether a checkpoint is whole and what K3's should be. Needs no GPU.

    Headers, tokenizer and a sample of the values, about a thousandth of K3. Exit code 3 if anything
    failed. The content's sha256 does not depend on how tensors are spread over files.
    """
    if state is not None and not with_hash:
        raise click.UsageError("--state is for --hash; give both")

    from nanok3 import commands_plan

    return commands_plan.check(
        model, draft=draft, with_hash=with_hash, state=state, as_json=as_json
    )


def read_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB|TB|MiB|GiB|TiB)?", text)
    if found is None:
        raise click.BadParameter(f"expected a size such as 141GB or 140GiB, found {text!r}")
    unit = found[2] or ""
    step = 1024 if "i" in unit else 1000
    return int(float(found[1]) * step ** " KMGT".index(unit[:1] or " "))
