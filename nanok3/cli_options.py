"""The options that several commands have, and what they come to. Knows click, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from nanok3.config import TP_SIZES, default_dtype
from nanok3.exits import EXIT_CODES

EPILOG = "\b\nExit codes:\n" + "\n".join(f"{code:>5}  {text}" for code, text in EXIT_CODES.items())
SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
FILE = click.Path(path_type=Path)
WHERE = (
    click.option(
        "--model", type=FILE, metavar="DIR", help="A K3 checkpoint; else the packaged one."
    ),
    click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float64"]),
        help="Else float32 on a CPU and bfloat16, the only one there, on a GPU.",
    ),
)
COMMON = (
    *WHERE,
    click.option("--max-tokens", type=int, help="Tokens of a reply, at most."),
    click.option("--temperature", type=float, help="0 takes the likeliest token."),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--seed", type=int, help="The same seed gives the same reply."),
    click.option("--presence-penalty", type=float),
    click.option("--frequency-penalty", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--stop", multiple=True, help="A text that ends the reply; may come again."),
    click.option("--thinking", type=click.Choice(["on", "off"]), help="Else on."),
    click.option(
        "--effort",
        type=click.Choice(["low", "high", "max"]),
        help="How much to think, else max; with --thinking off it means nothing.",
    ),
    click.option(
        "--draft",
        metavar="DIR|none",
        help="A DSpark draft of the model, for several tokens a step; else the packaged model's.",
    ),
    click.option("--context", type=click.IntRange(1), help="Tokens of prompt and reply, at most."),
    click.option("--requests", type=click.IntRange(1), help="How many run at once."),
    click.option(
        "--gpus",
        type=click.Choice([str(n) for n in TP_SIZES]),
        default="1",
        show_default=True,
        help="Processes that share the model, with --device cpu too.",
    ),
    click.option(
        "--strict",
        is_flag=True,
        help="Every row by itself: a reply never depends on its company; slower.",
    ),
    click.option(
        "--ops",
        type=click.Choice(["auto", "mega", "chain"]),
        help="On a GPU: a step as one launch (up to 8 requests), a launch an op, or the faster.",
    ),
    click.option("--show-config", is_flag=True, help="Say what is in force, and from where."),
)
RECORD = click.option(
    "--record", type=FILE, help="Gets what `nanok3 replay` needs, a line a reply; must not exist."
)


Command = Callable[..., int]


def shared(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Adds options that several commands have; `read_options` makes a record of COMMON's."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def read_options(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `commands.Options` from the values of COMMON's options."""
    sampling = {name: given[name] for name in SAMPLING if given[name] is not None}
    if given["stop"]:
        sampling["stop"] = given["stop"]
    thinking = None if given["thinking"] is None else given["thinking"] == "on"
    others = (
        *("model", "draft", "device", "dtype", "effort", "context", "requests", "strict"),
        "ops",
    )
    said = click.get_current_context().get_parameter_source
    fixed = ("device", "dtype", "gpus")
    named = frozenset(n for n in fixed if said(n) is ParameterSource.COMMANDLINE)
    given["dtype"] = given["dtype"] or default_dtype(given["device"])
    return {
        "sampling": sampling,
        "thinking": thinking,
        "gpus": int(given["gpus"]),
        "given": named,
        **{name: given[name] for name in (*others, "show_config")},
    }
