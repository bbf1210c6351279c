"""Text to token ids and back: K3's rank BPE, its 256 special ids, and decoding one id at a time.

A vocabulary is a rank file (`tiktoken.model`: base64 bytes and a rank a line) followed by the
special ids. How a conversation is laid out, and what of it is control and what is text, is left to
the chat module; it hands over segments. Stopping and parsing of answers are not here either.
"""

from __future__ import annotations

import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer

RANK_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
DAMAGED = "take the file from the checkpoint again"  # ends the errors about a file's contents

NUM_SPECIALS = 256
# Offset from the first special id -> name. An offset not listed is a reserved token.
NAMED_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

# How text is split before BPE. `&&` is class intersection, in Oniguruma as in Rust's regex.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The official encoder cuts very long text at these lengths and encodes each piece alone.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
RUN = re.compile(r"\S+|\s+")


class Segment(Protocol):
    """What the chat module hands over; any object with these two fields will do."""

    @property
    def kind(self) -> Literal["control", "text"]: ...

    @property
    def text(self) -> str: ...


class Tokenizer:
    """One vocabulary. Ids below `num_ranks` are BPE tokens, the 256 from there are specials."""

    def __init__(self, ranks: Sequence[bytes]) -> None:
        """`ranks` must hold all 256 single bytes and no token twice; `load` checks a file."""
        self.num_ranks = len(ranks)
        self.vocab_size = self.num_ranks + NUM_SPECIALS
        names = special_names(self.num_ranks)
        self._ids = {name: id for id, name in names.items()}
        self._bytes = [*ranks, *(name.encode() for name in names.values())]  # by id
        self._special = re.compile("(" + "|".join(re.escape(name) for name in self._ids) + ")")
        self._bpe = build_bpe(ranks)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a model directory, checking its tokenizer_config.json if it has one, or a rank file.

        Raises FileNotFoundError or ValueError with the line or id that is wrong.
        """
        if not path.is_dir():
            return cls(read_ranks(path))
        ranks = read_ranks(path / RANK_FILE)
        config = path / CONFIG_FILE
        if config.exists():
            check_config(config, special_names(len(ranks)))
        return cls(ranks)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; the name of a special token in it is ordinary text."""
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, which JSON can carry: replaced, as officially
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for piece in cut(text):
            ids += self._bpe.encode(piece).ids
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a prompt. Each segment is encoded alone: its borders are token borders.

        Only in a control segment do special names count; text between them is ordinary text.
        """
        ids: list[int] = []
        for segment in segments:
            if segment.kind == "control":
                ids += self._encode_control(segment.text)
            else:
                ids += self.encode(segment.text)
        return ids

    def continue_segments(self, segments: Sequence[Segment], before: Sequence[int]) -> list[int]:
        """`encode_segments`, but as many segments as `before` spells are those very ids.

        A model may write a text in other tokens than the encoder would. Ids that it has seen keep
        their place in its cache. Where no number of whole segments is that text, `before` is
        not used.
        """
        text = self.decode(before)
        done = 0  # characters of it that the segments so far spell
        for count, segment in enumerate(segments):
            if done == len(text):
                return [*before, *self.encode_segments(segments[count:])]
            if not text.startswith(segment.text, done):
                break
            done += len(segment.text)
        return self.encode_segments(segments)

    def _encode_control(self, text: str) -> list[int]:
        parts = self._special.split(text)  # text, name, text, name, ..., text
        if len(parts) == 1:
            raise ValueError(
                f"a control segment should hold one of the 256 special tokens, found {text!r}; "
                "plain text belongs in a text segment"
            )
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._ids[part])
            else:
                ids += self.encode(part)
        return ids

    def special_id(self, name: str) -> int:
        if name not in self._ids:
            raise ValueError(
                f"no special token is named {name!r}; the named ones are "
                f"{' '.join(NAMED_SPECIALS.values())}, the others <|reserved_token_ID|> with ID "
                f"from {self.num_ranks} to {self.vocab_size - 1}"
            )
        return self._ids[name]

    def special_name(self, id: int) -> str | None:
        """The name of a special id, None for any other id of the vocabulary."""
        text = self.token_bytes(id)
        return text.decode() if id >= self.num_ranks else None

    def token_bytes(self, id: int) -> bytes:
        """What an id stands for: any bytes, not always whole characters; a special's name."""
        if not 0 <= id < self.vocab_size:
            raise ValueError(
                f"token id {id} is outside this vocabulary of ids 0 to {self.vocab_size - 1}; "
                "the ids must come from this tokenizer or its model"
            )
        return self._bytes[id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, specials by name, with U+FFFD where the bytes are not UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes one id at a time; all pushes and the one finish joined are `decode` of all ids.

    A character may be spread over several ids: its bytes are held back until it is whole, or until
    it can no longer become whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finished = False

    def push(self, id: int) -> str:
        """The text that became certain with this id; often none."""
        assert not self._finished, "push after finish"
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """U+FFFD for what is still held back, if anything; called once, when no id will follow."""
        assert not self._finished, "finish called twice"
        self._finished = True
        return self._decoder.decode(b"", final=True)


def special_names(num_ranks: int) -> dict[int, str]:
    """Name of every special id, ascending. A reserved one is named by its id, not its offset."""
    return {
        num_ranks + offset: NAMED_SPECIALS.get(offset, f"<|reserved_token_{num_ranks + offset}|>")
        for offset in range(NUM_SPECIALS)
    }


def cut(text: str) -> Iterator[str]:
    """The pieces that the official encoder encodes one by one; nearly always just the text."""
    if len(text) <= MAX_RUN_CHARS:
        yield text
        return
    for begin in range(0, len(text), MAX_PIECE_CHARS):
        end = min(begin + MAX_PIECE_CHARS, len(text))
        start = begin
        for run in RUN.finditer(text, begin, end):
            for position in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield text[start:position]
                start = position
        yield text[start:end]


def build_bpe(ranks: Sequence[bytes]) -> BPETokenizer:
    """Rank BPE as a merge list: every split of a token into two tokens is a merge to its rank.

    This gives what tiktoken gives, for any rank file. As long as nothing merges across the two
    borders of a token-to-be, the bytes between them merge in the same order whatever surrounds
    them, and pass one two-part state: of a token's splits only one is ever met, so their order
    among themselves is free.
    """
    alphabet = byte_alphabet()
    names = [token.decode("latin-1").translate(alphabet) for token in ranks]
    vocab = {name: rank for rank, name in enumerate(names)}
    merges = [
        (left, right)
        for name in names
        for i in range(1, len(name))
        if (left := name[:i]) in vocab and (right := name[i:]) in vocab
    ]
    # ignore_merges: a split piece that is itself a token is that token, as in tiktoken.
    bpe = BPETokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return bpe


def byte_alphabet() -> dict[int, int]:
    """The character by which the tokenizers library writes each byte: printable Latin-1 characters
    for themselves, the others counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable, printable, strict=True)) | {
        byte: 256 + i for i, byte in enumerate(others)
    }


def read_ranks(path: Path) -> list[bytes]:
    """The tokens of a rank file by rank, or a ValueError that names the line at fault."""
    if not path.is_file():
        raise FileNotFoundError(
            f"the tokenizer's rank file {path} does not exist; give a model directory that holds "
            f"{RANK_FILE}, or a rank file"
        )
    ranks: dict[int, bytes] = {}
    known: set[bytes] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = binascii.a2b_base64(encoded, strict_mode=True), int(rank_text)
        except ValueError:
            raise ValueError(
                f"{path} line {number} should be a base64 token, a space and a rank, "
                f"found {line[:60]!r}; {DAMAGED}"
            ) from None
        if rank in ranks or token in known:
            raise ValueError(
                f"{path} line {number} should bring a new token and a new rank, but token "
                f"{token!r} or rank {rank} stands on an earlier line; {DAMAGED}"
            )
        ranks[rank] = token
        known.add(token)
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise ValueError(
                f"{path} has {len(ranks)} tokens, so ranks 0 to {len(ranks) - 1} were expected, "
                f"but rank {rank} is missing; {DAMAGED}"
            )
    for byte in range(256):
        if bytes([byte]) not in known:
            raise ValueError(
                f"{path} should have a rank for every single byte, but 0x{byte:02x} has none; "
                f"{DAMAGED}"
            )
    return [ranks[rank] for rank in range(len(ranks))]


def check_config(path: Path, names: dict[int, str]) -> None:
    """Refuse a tokenizer_config.json that names the special ids otherwise than K3 does."""
    try:
        added = json.loads(path.read_bytes())["added_tokens_decoder"]
        found = {int(id): str(token["content"]) for id, token in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} should be JSON whose added_tokens_decoder gives each id a content; "
            f"{DAMAGED}, or remove it to use K3's own names"
        ) from None
    first = min(names)
    named = {first + offset for offset in NAMED_SPECIALS}
    for id in sorted(named | found.keys()):
        if found.get(id) != names.get(id):
            expected = repr(names[id]) if id in names else "no special token"
            actual = repr(found[id]) if id in found else "nothing"
            raise ValueError(
                f"{path} should name id {id} as K3 does, {expected}, and has {actual}; "
                f"this is not the tokenizer of a K3 checkpoint with {first} ranks"
            )
