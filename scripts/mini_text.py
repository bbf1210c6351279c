"""The reading matter of k3-mini: what Python says about itself.

Three sources, all free to use under the PSF licence that Python itself carries: docstrings and
signatures of the standard library, the help topics of `pydoc_data`, and Python's HTML
documentation where Debian's package `python3.11-doc` is installed. `gather` returns documents
to train on; `entries` returns the same library as records that dialogues are made from.
"""

import importlib
import inspect
import io
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

HTML_ROOT = Path("/usr/share/doc/python3.11/html")
HTML_FOLDERS = ("library", "tutorial", "reference", "howto", "faq", "using", "whatsnew")

# Modules that open a browser, print, are someone's tests, or tell a reader nothing.
SKIP = {"antigravity", "this", "idlelib", "test", "lib2to3", "turtledemo", "ensurepip", "nt"}
SKIP |= {"posixpath", "ntpath", "sre_compile", "sre_constants", "sre_parse", "msilib", "winreg"}
SUBMODULES = [
    "os.path",
    "collections.abc",
    "concurrent.futures",
    "xml.etree.ElementTree",
    "xml.dom.minidom",
    "urllib.parse",
    "urllib.request",
    "urllib.error",
    "email.message",
    "email.parser",
    "email.policy",
    "email.utils",
    "html.parser",
    "http.client",
    "http.server",
    "http.cookies",
    "importlib.resources",
    "importlib.metadata",
    "importlib.util",
    "json.decoder",
    "json.encoder",
    "logging.handlers",
    "logging.config",
    "unittest.mock",
    "multiprocessing.pool",
    "multiprocessing.shared_memory",
    "multiprocessing.managers",
    "asyncio.subprocess",
    "wsgiref.simple_server",
]


@dataclass(frozen=True)
class Entry:
    """One documented thing of the library, under the name that a user would write."""

    name: str  # os.path.join, str.split, len
    kind: str  # module, class, function or method
    module: str  # os.path, builtins
    signature: str  # "(a, *p)", or "" where Python does not know it
    doc: str  # the docstring, cleaned, without a leading signature


def clean_doc(doc: str) -> str:
    """Returns a docstring without indentation, markup and the signatures that C code puts first."""
    text = inspect.cleandoc(doc).expandtabs()
    text = text.encode("ascii", "ignore").decode()
    lines = text.split("\n")
    while lines and re.fullmatch(r"[\w.]+\(.*\)( -> .*)?|", lines[0].strip()):
        lines.pop(0)
    text = "\n".join(line.rstrip() for line in lines)
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"`([^`'\n]*)[`']", r"\1", text)
    text = re.sub(r"([-=*_~#.+])\1{5,}", r"\1\1\1\1", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def sentences(doc: str, limit: int = 200) -> list[str]:
    """Returns the whole sentences of a docstring's first paragraph, up to `limit` characters."""
    first = re.sub(r"\s+", " ", doc.split("\n\n")[0]).strip()
    if not first or ">>>" in first or "::" in first or "|" in first:
        return []
    found: list[str] = []
    size = 0
    for part in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)\s+(?=[A-Z(\"'])", first):
        size += len(part) + 1
        if size > limit or part.endswith(":"):
            break
        found.append(part if part.endswith((".", "!", "?")) else part + ".")
    return found


# ---- the library, by inspection ----


def import_quietly(name: str) -> ModuleType | None:
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()):
                return importlib.import_module(name)
    except (Exception, SystemExit):
        return None


def signature_of(obj: object) -> str:
    try:
        text = str(inspect.signature(obj))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    # Addresses and long defaults are noise that changes from run to run.
    return text if len(text) < 160 and " at 0x" not in text and "<" not in text else ""


def module_names() -> list[str]:
    top = [n for n in sorted(sys.stdlib_module_names) if not n.startswith("_") and n not in SKIP]
    return top + SUBMODULES


def members(module: ModuleType, name: str) -> Iterator[Entry]:
    public = getattr(module, "__all__", None)
    prefix = "" if name == "builtins" else f"{name}."
    for attr in sorted(public if public is not None else vars(module)):
        obj = getattr(module, attr, None)
        if attr.startswith("_") or inspect.ismodule(obj):
            continue
        # Without __all__ a module's namespace also holds what it imported.
        home = getattr(obj, "__module__", None)
        if public is None and name != "builtins" and home not in (name, f"_{name}", None):
            continue
        doc = getattr(obj, "__doc__", None)
        if not isinstance(doc, str) or not (inspect.isclass(obj) or callable(obj)):
            continue
        kind = "class" if inspect.isclass(obj) else "function"
        yield Entry(prefix + attr, kind, name, signature_of(obj), clean_doc(doc))
        if kind == "class":
            yield from methods(obj, prefix + attr, name)


def methods(cls: object, prefix: str, module: str) -> Iterator[Entry]:
    for attr, raw in sorted(vars(cls).items()):
        obj = getattr(cls, attr, None)
        doc = getattr(obj, "__doc__", None)
        if attr.startswith("_") or not callable(obj) or inspect.isclass(obj):
            continue
        if isinstance(doc, str) and doc != getattr(type(raw), "__doc__", None):
            yield Entry(f"{prefix}.{attr}", "method", module, signature_of(obj), clean_doc(doc))


def entries() -> list[Entry]:
    """Returns every documented public name of the standard library, each once."""
    found: dict[str, Entry] = {}
    for name in module_names():
        module = import_quietly(name)
        if module is None:
            continue
        doc = module.__doc__
        if doc:
            found.setdefault(name, Entry(name, "module", name, "", clean_doc(doc)))
        for entry in members(module, name):
            found.setdefault(entry.name, entry)
    return [e for e in found.values() if e.doc]


# ---- the HTML documentation ----


class Reader(HTMLParser):
    """Collects the paragraphs, headings, definitions and code of a Sphinx page's main part."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.text = ""
        self.divs = 0  # open <div>s
        self.body = 0  # the depth at which the main part began; 0 = outside
        self.skipping = 0  # the depth at which a part to skip began
        self.in_anchor = False  # inside a heading's pilcrow link
        self.in_pre = False
        self.bullet = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "div":
            self.divs += 1
            if "body" in classes:
                self.body = self.divs
            elif {"toctree-wrapper", "contents"} & set(classes) and not self.skipping:
                self.skipping = self.divs
        if tag == "a" and "headerlink" in classes:
            self.in_anchor = True
        elif tag in ("p", "h1", "h2", "h3", "h4", "h5", "li", "dt", "dd", "pre", "tr", "div"):
            self.flush()
            self.in_pre = tag == "pre"
            if tag == "li" and self.body:
                self.bullet = "- "

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self.in_anchor = False
        elif tag in ("td", "th"):
            self.text += " "
        elif tag in ("p", "h1", "h2", "h3", "h4", "h5", "li", "dt", "dd", "pre", "tr", "div"):
            self.flush()
            self.in_pre = False
        if tag == "div":
            if self.divs == self.skipping:
                self.skipping = 0
            if self.divs == self.body:
                self.body = 0
            self.divs -= 1

    def handle_data(self, data: str) -> None:
        if self.body and not self.skipping and not self.in_anchor:
            self.text += data

    def flush(self) -> None:
        text = self.text.strip("\n").rstrip() if self.in_pre else " ".join(self.text.split())
        self.text = ""
        if text:
            self.blocks.append(self.bullet + text)
            self.bullet = ""


PUNCTUATION = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
    | {"\u2026": "...", "\u00a0": " ", "\u00b6": "", "\u2192": "->", "\u00d7": "x"}
)


def read_page(path: Path) -> str:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.flush()
    text = "\n\n".join(reader.blocks).translate(PUNCTUATION)
    # Long runs of one sign (rules, tables drawn in text) would eat ranks and teach nothing.
    return re.sub(r"([-=*_~#.+])\1{5,}", r"\1\1\1\1", text)


def html_documents(root: Path) -> list[str]:
    found: list[str] = []
    for folder in HTML_FOLDERS:
        for path in sorted((root / folder).glob("*.html")):
            text = read_page(path)
            if len(text) > 500:
                found.append(text)
    return found


# ---- all of it ----


def gather(library: list[Entry], html_root: Path = HTML_ROOT) -> list[str]:
    """Returns the documents to train on, and says on stderr what each source gave."""
    texts: list[str] = []
    seen: set[str] = set()
    for entry in library:
        if entry.doc not in seen:  # inherited docstrings come up many times
            seen.add(entry.doc)
            texts.append(f"{entry.name}{entry.signature}\n\n{entry.doc}")
    report("docstrings", texts)

    topics_module = import_quietly("pydoc_data.topics")
    topics: dict[str, str] = getattr(topics_module, "topics", {})
    topic_texts = [clean_doc(text) for text in topics.values()]
    report("help topics", topic_texts)

    pages = html_documents(html_root) if html_root.is_dir() else []
    report(f"documentation in {html_root}" if pages else "no HTML documentation", pages)
    return texts + topic_texts + pages


def report(source: str, texts: list[str]) -> None:
    size = sum(map(len, texts)) / 1e6
    print(f"{source}: {len(texts)} documents, {size:.1f} M characters", file=sys.stderr)
