"""The command line of `nanok3 bench` and `nanok3 trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nanok3.cli_options import EPILOG, WHERE, shared
from nanok3.config import default_dtype


@click.group(no_args_is_help=False)
def bench() -> None:
    """Measure speed, after checking values."""


@bench.command("decode", epilog=EPILOG)
@shared(WHERE)
@click.option(
    "--requests",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 8),
    show_default=True,
    help="How many run at once; give it again for each batch size.",
)
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--decode-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--draft",
    metavar="DIR|k3_mini_draft",
    help="Measure a draft instead: a few questions, one at a time, with it and without.",
)
@click.option("--json", "as_json", is_flag=True, help="Only the line of JSON that comes last.")
def bench_decode(
    model: Path | None,
    device: str,
    dtype: str | None,
    requests: tuple[int, ...],
    prompt_tokens: int,
    decode_tokens: int,
    repeats: int,
    draft: str | None,
    as_json: bool,
) -> int:
    """Tokens a second while requests decode, and the share of the memory's speed."""
    from nanok3 import commands_bench

    return commands_bench.bench_decode(
        model,
        device,
        dtype or default_dtype(device),
        requests=requests,
        prompt_tokens=prompt_tokens,
        decode_tokens=decode_tokens,
        repeats=repeats,
        draft=draft,
        as_json=as_json,
    )


OPS = ("chain", "plain", "mega", "torch")
OF_A_RANK = [
    click.option("--tp", type=click.IntRange(1), default=16, show_default=True, help="Ranks."),
    click.option("--rank", type=click.IntRange(0), default=0, show_default=True),
    click.option(
        "--requests", type=click.IntRange(1), multiple=True, default=(1,), show_default=True
    ),
    click.option(
        "--rows",
        type=click.IntRange(1),
        multiple=True,
        default=(1,),
        show_default=True,
        help="Of each request in a step. Several: a case for every combination.",
    ),
    click.option(
        "--context", type=click.IntRange(1), multiple=True, default=(4096,), show_default=True
    ),
    click.option(
        "--ops",
        type=click.Choice(OPS),
        multiple=True,
        default=("chain", "plain", "mega"),
        show_default=True,
        help="chain: a launch an op; plain: the same without programmatic launch; mega: one launch;"
        " torch: cuBLAS and plain ops.",
    ),
    click.option(
        "--json", "json_file", type=click.Path(path_type=Path), help="Append all lines to a file."
    ),
]


@bench.command("layer", epilog=EPILOG)
@click.option("--kind", type=click.Choice(["kda", "mla"]), default="kda", show_default=True)
@shared(OF_A_RANK)
def bench_layer(kind: str, **options: Any) -> int:
    """Layers of the real K3 as one rank of many, random weights, on a GPU."""
    from nanok3 import commands_bench

    return commands_bench.bench_layers(kind, **options)


@bench.command("step", epilog=EPILOG)
@shared(OF_A_RANK)
def bench_step(**options: Any) -> int:
    """All layers and the head of the real K3 as one rank of many, random weights, on a GPU."""
    from nanok3 import commands_bench

    return commands_bench.bench_layers("step", **options)


@click.command("trace", epilog=EPILOG)
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kind", type=click.Choice(["kda", "mla"]), default="kda", show_default=True)
@click.option("--tp", type=click.IntRange(1), default=16, show_default=True, help="Ranks.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="Of a request.")
@click.option("--context", type=click.IntRange(1), default=4096, show_default=True)
def trace(out: Path, kind: str, **sizes: int) -> int:
    """Where the persistent kernel's time goes: OUT is a file for Perfetto; prints a table."""
    from nanok3 import commands_bench

    return commands_bench.trace(out, kind, **sizes)
