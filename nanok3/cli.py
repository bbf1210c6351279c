"""The command line: reads options, calls one function of `commands.py`, prints what went wrong.

The only file that knows click. Results go to stdout, everything else to stderr. `commands.py`
brings torch, so it is imported inside the functions: `--help` and wrong options do not wait for it.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from nanok3.config import TP_SIZES, default_dtype
from nanok3.console import (
    OutputError,
    TextError,
    close_stdout,
    decode_text,
    note,
    read_file,
    read_stdin,
)
from nanok3.exits import DONE, EXIT_CODES, INTERRUPTED, OUTPUT, PIPE, REQUEST, Refused

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
    click.option("--strict", is_flag=True, help="A reply never depends on its company; slower."),
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


@click.group(epilog=EPILOG)
def cli() -> None:
    """Kimi K3 on this machine.

    An option goes before what a request says, that before the model's generation_config.json, and
    that before what is built in.
    """


@cli.command(epilog=EPILOG)
@RECORD
@shared(COMMON)
def chat(record: Path | None, **given: Any) -> int:
    """Talk with the model. Ctrl-C stops an answer, a second one leaves."""
    from nanok3 import commands

    return commands.chat(commands.Options(**read_options(given)), record)


@cli.command(epilog=EPILOG)
@click.argument("prompt", required=False)
@click.option("--file", type=FILE, help="Holds the prompt.")
@click.option("--messages", type=FILE, help="Holds a JSON list of messages.")
@click.option("--tools", type=FILE, help="Holds a JSON list of tools in OpenAI's form.")
@click.option("--show-thinking", is_flag=True, help="On stderr.")
@click.option("--json", "as_json", is_flag=True, help="The whole result as one JSON object.")
@RECORD
@shared(COMMON)
def generate(
    prompt: str | None,
    file: Path | None,
    messages: Path | None,
    tools: Path | None,
    show_thinking: bool,
    as_json: bool,
    record: Path | None,
    **given: Any,
) -> int:
    """Reply once, to PROMPT, a file, or stdin if PROMPT is - or left out.

    The text goes to stdout while it comes, and each tool call as a line of JSON.
    """
    if sum(source is not None for source in (prompt, file, messages)) > 1:
        raise click.UsageError("give one of PROMPT, --file and --messages")
    from_stdin = prompt == "-" or (prompt is None and file is None and messages is None)
    if prompt is None and from_stdin and sys.stdin.isatty():
        raise click.UsageError("no prompt: give PROMPT, --file, --messages or text on stdin")
    text = ""
    if from_stdin:
        text = read_stdin()
    elif file is not None:
        text = read_file(file)
    elif prompt is not None:  # the system's arguments may hold any bytes
        text = decode_text(prompt.encode("utf-8", "surrogateescape"), "the prompt")

    from nanok3 import commands

    return commands.generate(
        commands.Options(**read_options(given)),
        text if messages is None else commands.read_json_list(messages, "messages"),
        tools=None if tools is None else commands.read_json_list(tools, "tools"),
        show_thinking=show_thinking,
        as_json=as_json,
        record=record,
    )


@cli.command(epilog=EPILOG)
@click.argument("record", type=FILE)
@click.option("--model", type=FILE, metavar="DIR", help="Needed unless it is the packaged one.")
@click.option("--draft", metavar="DIR|none", help="Needed unless it is the packaged one.")
@click.option("--device", help="cpu, cuda or cuda:N; else the record's.")
@click.option("--strict", is_flag=True, help="One row at a time, whatever the record says.")
def replay(
    record: Path, model: Path | None, draft: str | None, device: str | None, strict: bool
) -> int:
    """Run again what `--record` wrote of generate or chat, and say where it first differs.

    A line a reply. A greedy reply may differ by rounding where the two best logits were less than
    0.001 apart; that is said, and differs nonetheless.
    """
    from nanok3 import commands

    return commands.replay(record, model, draft=draft, device=device, strict=strict)


@cli.command(epilog=EPILOG)
@click.argument("source", metavar="IN.jsonl")
@click.argument("target", metavar="OUT.jsonl")
@click.option("--resume", is_flag=True, help="Go on with the OUT.jsonl of a run that was cut off.")
@click.option("--errors", metavar="FILE", help="Gets the records of failed lines besides.")
@click.option(
    "--on-interrupt",
    type=click.Choice(["finish", "stop"]),
    default="finish",
    show_default=True,
    help="The first Ctrl-C lets the replies that run be finished, or not.",
)
@shared(COMMON)
def batch(
    source: str,
    target: str,
    resume: bool,
    errors: str | None,
    on_interrupt: str,
    **given: Any,
) -> int:
    """Answer every line of IN.jsonl (or gzip of it), in order; - is stdin or stdout.

    A line is {"prompt": ...}, {"messages": ...} or OpenAI's batch form, each with the options of a
    chat completion. A line that cannot be answered gets a record that says why. What is finished
    is kept in OUT.jsonl.journal until OUT.jsonl is whole, so that nothing ends a run for good.
    """
    from nanok3 import commands

    options = commands.Options(**read_options(given))
    return commands.batch(
        options,
        source,
        target,
        resume=resume,
        errors=errors,
        finish_running=on_interrupt == "finish",
    )


@cli.command(epilog=EPILOG)
@click.option("--model", metavar="DIR|k3", help="A K3 checkpoint; k3 needs no files; else k3-mini.")
@click.option(
    "--gpus", type=click.Choice([str(n) for n in TP_SIZES]), default="1", show_default=True
)
@click.option("--context", type=click.IntRange(1), help="Tokens of prompt and reply of a request.")
@click.option("--requests", type=click.IntRange(1), default=8, show_default=True, help="At once.")
@click.option(
    "--gpu-memory",
    default="141GB",
    show_default=True,
    callback=lambda context, option, text: read_bytes(text),
    help="Bytes, or with a unit: GB, GiB.",
)
@click.option("--json", "as_json", is_flag=True, help="The plan as one JSON object.")
def plan(
    model: str | None,
    gpus: str,
    context: int | None,
    requests: int,
    gpu_memory: int,
    as_json: bool,
) -> int:
    """What each GPU has to hold, and whether it can. Needs no GPU and no weights.

    What the driver, compiled kernels and captured graphs take outside of torch is not counted.
    """
    from nanok3 import commands

    return commands.plan(
        model,
        gpus=int(gpus),
        context=context,
        requests=requests,
        gpu_memory=gpu_memory,
        as_json=as_json,
    )


@cli.command(epilog=EPILOG)
@click.option("--model", type=FILE, metavar="DIR", help="A K3 checkpoint; else the packaged one.")
@click.option(
    "--hash", "with_hash", is_flag=True, help="Read everything; sha256 of files, content."
)
@click.option(
    "--state",
    type=FILE,
    help="Keeps the hashes of finished files, to go on; else nanok3-check.jsonl, here.",
)
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def check(model: Path | None, with_hash: bool, state: Path | None, as_json: bool) -> int:
    """Whether a checkpoint is whole and what K3's should be. Needs no GPU.

    Headers, tokenizer and a sample of the values, about a thousandth of K3. Exit code 3 if anything
    failed. The content's sha256 does not depend on how tensors are spread over files.
    """
    if state is not None and not with_hash:
        raise click.UsageError("--state is for --hash; give both")

    from nanok3 import commands

    return commands.check(model, with_hash=with_hash, state=state, as_json=as_json)


@cli.group(no_args_is_help=False)
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
    from nanok3 import commands

    return commands.bench_decode(
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
    from nanok3 import commands

    return commands.bench_layers(kind, **options)


@bench.command("step", epilog=EPILOG)
@shared(OF_A_RANK)
def bench_step(**options: Any) -> int:
    """All layers and the head of the real K3 as one rank of many, random weights, on a GPU."""
    from nanok3 import commands

    return commands.bench_layers("step", **options)


@cli.command("trace", epilog=EPILOG)
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kind", type=click.Choice(["kda", "mla"]), default="kda", show_default=True)
@click.option("--tp", type=click.IntRange(1), default=16, show_default=True, help="Ranks.")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=1, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=1, show_default=True, help="Of a request.")
@click.option("--context", type=click.IntRange(1), default=4096, show_default=True)
def trace(out: Path, kind: str, **sizes: int) -> int:
    """Where the persistent kernel's time goes: OUT is a file for Perfetto; prints a table."""
    from nanok3 import commands

    return commands.trace(out, kind, **sizes)


def read_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB|TB|MiB|GiB|TiB)?", text)
    if found is None:
        raise click.BadParameter(f"expected a size such as 141GB or 140GiB, found {text!r}")
    unit = found[2] or ""
    step = 1024 if "i" in unit else 1000
    return int(float(found[1]) * step ** " KMGT".index(unit[:1] or " "))


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


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line; an error is a sentence on stderr."""
    code, message = DONE, ""
    try:
        with cli.make_context("nanok3", list(arguments) or ["--help"]) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as error:  # --help
        code = error.exit_code
    except click.ClickException as error:
        code, message = error.exit_code, error.format_message()
    except Refused as error:
        code, message = error.code, str(error)
    except TextError as error:
        code, message = REQUEST, str(error)
    except OutputError as error:
        code, message = OUTPUT, str(error)
    except BrokenPipeError:
        code = PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        code, message = OUTPUT, f"stdout cannot be written: {error.strerror}"  # by --help
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code in (OUTPUT, PIPE):
        close_stdout()
    if message:
        note(f"nanok3: {message}")
    return code


def main() -> None:
    # A stream that the shell closed is None. Nothing on stdin is fine, nowhere for notes too.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115, open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        note("nanok3: stdout is closed, and results go there")
        sys.exit(OUTPUT)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
