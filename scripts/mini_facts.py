"""What k3-mini can say about each name of the standard library.

A `Fact` holds the rest of a sentence that starts with the name: "joins one or more path
components". For some 400 common names that sentence is hand-written (`mini_facts.txt`); for the
others it is made from the docstring, where the docstring starts in a way that we can turn round.
"""

import ast
import builtins
import importlib
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mini_text import Entry, sentences

FACTS_FILE = Path(__file__).with_name("mini_facts.txt")

PHRASES_FILE = Path(__file__).with_name("mini_phrases.txt")
# Second verbs of a sentence ("flush and close") that are hardly ever nouns there.
SECOND = "return|raise|remove|add|delete|write|close|create|yield|send|print|store|convert|append"
SKIPPED_MODULES = (
    "posix",
    "tkinter",
    "turtle",
    "curses",
    "distutils",
    "pydoc_data",
    "lib2to3",
    "imp",
)


def load_phrases() -> dict[str, list[str]]:
    """The lists of mini_phrases.txt by kind."""
    found: dict[str, list[str]] = {}
    kind = ""
    for line in PHRASES_FILE.read_text().splitlines():
        mark, _, text = line.partition(" ")
        if mark == "=":
            kind = text
            found[kind] = []
        elif mark == ">":
            found[kind] += text.split(" | ")
    return found


# First words of docstrings that are verbs: "Return the ..." becomes "returns the ...".
VERBS = frozenset(load_phrases()["verb"])


@dataclass(frozen=True)
class Fact:
    """What can be said about one name."""

    name: str  # os.path.join
    kind: str  # module, class, function or method
    module: str
    says: str  # "joins one or more path components", without a final full stop
    common: bool  # hand-written, and drawn far more often
    example: tuple[str, str] | None  # an expression and the repr of its value
    arguments: list[str] | None  # "src", "follow_symlinks (default True)"; None = not known

    @property
    def short(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def place(self) -> str:
        """Where the name lives, as in "a function of the os.path module"."""
        if self.kind == "module":
            return "a module of the standard library"
        if self.kind == "method":
            return f"a method of {self.name.rsplit('.', 1)[0]}"
        if self.module == "builtins":
            return f"a built-in {self.kind}"
        return f"a {self.kind} of the {self.module} module"


def with_s(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z")) or verb in ("do", "undo"):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def lower_first(text: str) -> str:
    head = text.split(maxsplit=1)[0]
    return text if any(c.isupper() or c.isdigit() for c in head[1:]) else text[0].lower() + text[1:]


def predicate(sentence: str, kind: str) -> str | None:
    """Turns a docstring's sentence into the rest of a sentence about its subject, if we can."""
    text = re.sub(r"\s+", " ", sentence).strip().rstrip(".!")
    first, _, rest = text.partition(" ")
    word = first.lower().rstrip(",:")
    if not rest or not first[0].isalpha() or not word.isalpha():
        return None
    if word in VERBS:
        rest = re.sub(rf"\b(and|or) ({SECOND})\b", lambda m: f"{m[1]} {with_s(m[2])}", rest)
        return f"{with_s(word)} {rest}"
    if word.endswith("s") and (word[:-1] in VERBS or word[:-2] in VERBS):
        return f"{word} {rest}"
    if word in ("raised", "called", "like", "deprecated", "similar", "equivalent"):
        return f"is {word} {rest}"
    if word in ("a", "an", "the", "abstract") and kind in ("class", "module"):
        return f"is {lower_first(text)}"
    if word in ("base", "class", "exception", "error", "interface", "context", "helper"):
        return f"is a {lower_first(text)}" if word[0] not in "aei" else f"is an {lower_first(text)}"
    return f"is the same {rest}" if word == "same" else None


def base_clause(says: str) -> str | None:
    """ "joins path components, and .." -> "join path components"; None for what is no action."""
    clause = re.split(r", | and (?:returns|raises|inserts)", says)[0]
    word, _, rest = clause.partition(" ")
    verb = next((v for v in (word[:-1], word[:-2], word[:-3] + "y") if with_s(v) == word), None)
    if verb is None or verb not in VERBS or word == "is" or len(rest) < 8:
        return None
    return f"{'get' if verb == 'return' else verb} {rest}"


def parse_arguments(signature: str) -> list[str] | None:
    """Returns a signature's arguments in words, without `self`; None if it cannot be read."""
    try:
        node = ast.parse(f"def f{signature}: pass").body[0]
    except SyntaxError:
        return None
    assert isinstance(node, ast.FunctionDef)
    if not signature:
        return None
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    pairs = list(zip(plain, [*defaults, *args.defaults], strict=True))
    found = [in_words(a.arg, d) for a, d in pairs if a.arg not in ("self", "cls")]
    if args.vararg:
        found.append("*" + args.vararg.arg)
    keyword_only = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [in_words(a.arg, d) for a, d in keyword_only]
    if args.kwarg:
        found.append("**" + args.kwarg.arg)
    return found if len(found) <= 6 else None


def in_words(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name} (default {ast.unparse(default)})"


def evaluate(expression: str) -> str:
    """The repr of an example of ours, with the modules that it names imported."""
    scope: dict[str, object] = {}
    for dotted in re.findall(r"\b[a-z_]\w*(?:\.\w+)+", expression):
        parts = dotted.split(".")
        for end in range(1, len(parts)):
            try:
                importlib.import_module(".".join(parts[:end]))
            except ImportError:
                break
            scope[parts[0]] = importlib.import_module(parts[0])
    return repr(eval(expression, scope))


def kind_of(name: str) -> tuple[str, str]:
    """Kind and module of a hand-written name that inspection did not list."""
    parts = name.split(".")
    if name in sys.stdlib_module_names:
        return "module", name
    scope = importlib.import_module(parts[0]) if not hasattr(builtins, parts[0]) else builtins
    owner: object = scope
    for part in parts[:-1] if scope is builtins else parts[1:-1]:
        owner = getattr(owner, part)
    value = getattr(owner, parts[-1])
    module = "builtins" if scope is builtins else parts[0]
    if inspect.isclass(owner):
        return "method", module
    return (
        "class" if inspect.isclass(value) else "function" if callable(value) else "value"
    ), module


def load(library: list[Entry]) -> list[Fact]:
    """Returns all facts, the hand-written ones first."""
    known = {entry.name: entry for entry in library}
    found: dict[str, Fact] = {}
    for line in FACTS_FILE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, says, expression = (part.strip() for part in line.split("|", 2))
        entry = known.get(name)
        kind, module = (entry.kind, entry.module) if entry else kind_of(name)
        example = (expression, evaluate(expression)) if expression else None
        arguments = parse_arguments(entry.signature) if entry else None
        found[name] = Fact(name, kind, module, says, True, example, arguments)
    for entry in library:
        if (
            entry.name in found
            or entry.name.startswith("typing.Text")
            or entry.module.startswith(SKIPPED_MODULES)
        ):
            continue
        spoken = sentences(entry.doc, limit=160)
        said = predicate(spoken[0], entry.kind) if spoken else None
        if said and said.isascii() and len(entry.name) < 45:
            arguments = parse_arguments(entry.signature)
            found[entry.name] = Fact(
                entry.name, entry.kind, entry.module, said, False, None, arguments
            )
    return list(found.values())
