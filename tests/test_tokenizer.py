"""The tokenizer against tiktoken, the encoder that K3's own wrapper calls, and decoding against
Python's own UTF-8 decoder.

The full-size rank file is Qwen's, from `../shared/data`; tests that need it are skipped without it.
Every other test uses rank files made here. K3's own rank file is in neither place, so the published
ids of K3 prompts are not checked.
"""

from __future__ import annotations

import base64
import codecs
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from nanok3.tokenizer import StreamDecoder, Tokenizer, cut

FULL_SIZE = Path(__file__).parents[2] / "shared" / "data" / "qwen.tiktoken"

# As the checkpoint publishes it, in the syntax of Rust's regex.
PUBLISHED_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

OFFICIAL_IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|end_of_msg|>": 163586,
    "<|open|>": 163587,
    "<|close|>": 163588,
    "<|sep|>": 163589,
    "[start_header_id]": 163590,
    "[end_header_id]": 163591,
    "[EOT]": 163593,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<osagent_mode>": 163649,
    "[UNK]": 163838,
    "[PAD]": 163839,
}

# Each string is a pool; a fuzzed text draws characters or whole entries from a few pools.
CHARACTERS = [
    "中文字漢語々〇㐀𠀀你好世界學",
    "ひらがなカタカナーゝヽｶﾞ",
    "한국어조선말ㄱㅏ",
    "Привет Ёжик ЩЪЫ",
    "العربيةِ ُ٣٤ـ",
    "हिन्दी क्षत्रिय १२",
    "ภาษาไทยกำลัง๑๒",
    "a\u0301e\u0308o\u0302\u0323\u0300\u20dd\u0489",
    "ǅǈǋᾈﬁßſŉİıΣςŁŻ",
    "abcdefgh",
    "ABCDEFGH",
    "aAbBcC",
    "0123456789²½Ⅷ\u09ea",
    "!?.,;:-_/\\()[]{}<>|\"'`~@#$%^&*+=",
    "“”\u2018\u2019…—€£¥。、\uff01\uff1f「」",
    " ",
    "\t\v\f\u00a0\u2003\u3000\u2028\u0085\u200b\ufeff\x00\x1c",
    "\r\n",
    "\U0001f600\U0001f44d\U0001f3fd\u200d\ufe0f\U0001f469\U0001f4bb❤",
]
ENTRIES = [
    ["'s", "'S", "'LL", "'ll", "'Re", "'vE", "'m", "'D", "'t", "'\u017f", "'x", "\u2019s"],
    ["\r\n", "\n\n", "\r\r\n", " \n", "\n ", "  \r\n  ", "\t\n"],
    ["👩\u200d💻", "👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇯🇵", "1\ufe0f⃣"],
    ["HelloWorld", "fooBAR", "JSONData", "iPhone", "don't", "I'LL", "McDonald's", "the", " The"],
    ["def f(x):\n", "    return x\n", "\t\tif (a&&b)\n", "0x1F", "3.14159", "://", "```json\n"],
    [*OFFICIAL_IDS, "<|reserved_token_163592|>", "<|im_end|>", "<|open|", "open|>"],
]


def fuzz_text(rng: random.Random) -> str:
    """A text that mixes a few pools, with runs of one character now and then."""
    pools: list[Sequence[str]] = rng.sample([*CHARACTERS, *ENTRIES], rng.randint(1, 4))
    parts: list[str] = []
    for _ in range(rng.randint(1, 30)):
        repeats = rng.choice([1, 1, 1, 1, 1, 1, 1, 2, 3, rng.randint(4, 80)])
        parts.append(rng.choice(rng.choice(pools)) * repeats)
    return "".join(parts)


def fuzz_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [fuzz_text(rng) for _ in range(count)]


def random_ranks(seed: int, count: int) -> list[bytes]:
    """Single bytes and random pieces of fuzzed texts, in no order that any training would give."""
    rng = random.Random(seed)
    tokens = {bytes([byte]) for byte in range(256)}
    data = [text.encode() for text in fuzz_texts(seed + 1000, 300)]
    while len(tokens) < 256 + count:
        text = rng.choice(data)
        start = rng.randrange(len(text))
        tokens.add(text[start : start + rng.choice([2, 2, 2, 3, 3, 4, 5, 6, 9])])
    ranks = sorted(tokens)
    rng.shuffle(ranks)
    return ranks


def write_ranks(path: Path, ranks: Sequence[bytes]) -> Path:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    path.write_bytes(b"".join(lines))
    return path


def tiktoken_encoding(ranks: Sequence[bytes], pattern: str) -> tiktoken.Encoding:
    by_token = {token: rank for rank, token in enumerate(ranks)}
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=by_token, special_tokens={})


def assert_same_ids(tokenizer: Tokenizer, encoding: tiktoken.Encoding, texts: list[str]) -> None:
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == encoding.encode_ordinary(text), repr(text)
        assert tokenizer.decode(ids) == text


@dataclass(frozen=True)
class Segment:
    kind: Literal["control", "text"]
    text: str


@pytest.fixture(scope="module")
def small_ranks() -> list[bytes]:
    return random_ranks(seed=0, count=2000)


@pytest.fixture(scope="module")
def small(small_ranks: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_ranks(tmp_path_factory.mktemp("small") / "ranks", small_ranks))


@pytest.fixture(scope="module")
def full_ranks() -> list[bytes]:
    if not FULL_SIZE.exists():
        pytest.skip(f"no full-size rank file at {FULL_SIZE}")
    lines = [line.split() for line in FULL_SIZE.read_bytes().splitlines()]
    return [base64.b64decode(token) for token, _ in lines]


@pytest.fixture(scope="module")
def full(full_ranks: list[bytes]) -> Tokenizer:
    start = time.perf_counter()
    tokenizer = Tokenizer.load(FULL_SIZE)
    print(f"\nloaded {len(full_ranks)} ranks in {time.perf_counter() - start:.2f} s")
    return tokenizer


# ---- ids ----


def test_encode_equals_tiktoken_at_full_size(full: Tokenizer, full_ranks: list[bytes]) -> None:
    encoding = tiktoken_encoding(full_ranks, PUBLISHED_PATTERN)
    assert_same_ids(full, encoding, fuzz_texts(seed=1, count=3000))


def test_encode_equals_tiktoken(small: Tokenizer, small_ranks: list[bytes]) -> None:
    encoding = tiktoken_encoding(small_ranks, PUBLISHED_PATTERN)
    assert_same_ids(small, encoding, fuzz_texts(seed=2, count=2000))


@pytest.mark.parametrize("seed", range(20))
def test_merges_equal_tiktoken_for_any_rank_file(seed: int) -> None:
    """Tokens over two letters, in random order: many have several splits that could compete."""
    rng = random.Random(seed)
    strings = {"".join(rng.choices("ab", k=rng.randint(2, 7))) for _ in range(60)}
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in sorted(strings)]
    rng.shuffle(tokens)
    encoding = tiktoken_encoding(tokens, PUBLISHED_PATTERN)
    runs = [["a", "b", "aa", "ab", "bbb", "aaaaa"][: rng.randint(1, 6)] for _ in range(50)]
    texts = ["".join(rng.choices(run, k=rng.randint(1, 40))) for run in runs]
    assert_same_ids(Tokenizer(tokens), encoding, texts)


def test_every_assigned_kind_of_character_splits_as_in_tiktoken() -> None:
    """The two regex engines must agree on each character's class: one in 61 of all, in contexts
    where the class shows, with every piece that could result a token."""
    characters = [chr(c) for c in range(0, 0x110000, 61) if not 0xD800 <= c < 0xE000]
    contexts = ["{}a", "a{}", "A{}A", "1{}", " {}", "中{}", "{}\n", "!{}", "  {}"]
    for start in range(0, len(characters), 3000):
        chunk = characters[start : start + 3000]
        texts = [context.format(character) for character in chunk for context in contexts]
        tokens = {bytes([byte]): None for byte in range(256)}  # a dict keeps the order
        for text in texts:
            for i in range(len(text)):
                tokens |= {text[i:j].encode(): None for j in range(i + 1, len(text) + 1)}
        ranks = list(tokens)
        assert_same_ids(Tokenizer(ranks), tiktoken_encoding(ranks, PUBLISHED_PATTERN), texts)


@pytest.mark.parametrize(
    "unit", ["a", "A", "aB", " ", " \n", "\t ", "-", "=-", "7", "é", "中", "😀"]
)
def test_long_runs_encode_as_in_tiktoken(
    full: Tokenizer, full_ranks: list[bytes], unit: str
) -> None:
    encoding = tiktoken_encoding(full_ranks, PUBLISHED_PATTERN)
    texts = [f"x{unit * count}{end}" for count in (127, 1000, 6001) for end in ("", "y", "\n")]
    assert_same_ids(full, encoding, texts)


def test_control_strings_in_text_are_ordinary_text(small: Tokenizer) -> None:
    names = [small.special_name(id) for id in range(small.num_ranks, small.vocab_size)]
    for name in names:
        assert name is not None
        ids = small.encode(f"a{name}b")
        assert max(ids) < small.num_ranks
        assert small.decode(ids) == f"a{name}b"


def test_lone_surrogates_are_replaced_as_in_tiktoken(
    small: Tokenizer, small_ranks: list[bytes]
) -> None:
    encoding = tiktoken_encoding(small_ranks, PUBLISHED_PATTERN)
    for text in ["a\ud800b", "\ude00", "\ud83d\ude00", "中\ud83d"]:
        assert small.encode(text) == encoding.encode_ordinary(text)


def official_pieces(text: str) -> list[str]:
    """The official wrapper's cutting, a character at a time."""
    pieces = []
    for begin in range(0, len(text), 400_000):
        piece, run = "", 0
        for i in range(begin, min(begin + 400_000, len(text))):
            same_kind = i > begin and text[i].isspace() == text[i - 1].isspace()
            run = run + 1 if same_kind else 1
            if run > 25_000:
                pieces.append(piece)
                piece, run = "", 1
            piece += text[i]
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 25_000,
        "a" * 25_001,
        " " * 50_000 + "b",
        "\x1c\x85\u3000 \n" * 5_001 + "字" * 75_001 + " x",
        "\u180e\u200b\ufeff" * 10_000,  # look like spaces and are none
        "ab " * 133_333 + "cd" + " e" * 200_000,
        "x" * 399_990 + " " * 30_000,
    ],
    ids=lambda text: f"{text[:2]!r} {len(text)}",
)
def test_long_text_is_cut_as_officially(text: str) -> None:
    assert [piece for piece in cut(text) if piece] == [p for p in official_pieces(text) if p]


def test_pieces_of_long_text_are_encoded_alone(small: Tokenizer, small_ranks: list[bytes]) -> None:
    encoding = tiktoken_encoding(small_ranks, PUBLISHED_PATTERN)
    text = "1" * 25_001 + " " + "ab" * 13_000
    alone = [id for piece in official_pieces(text) for id in encoding.encode_ordinary(piece)]
    assert small.encode(text) == alone
    assert alone != encoding.encode_ordinary(text)


# ---- special ids ----


def test_named_specials_stand_at_their_official_offsets(small: Tokenizer) -> None:
    for name, official in OFFICIAL_IDS.items():
        assert small.special_id(name) == small.num_ranks + official - 163584
    assert small.vocab_size == small.num_ranks + 256


def test_specials_round_trip_and_reserved_ones_are_named_by_absolute_id(small: Tokenizer) -> None:
    official_named = {small.num_ranks + id - 163584 for id in OFFICIAL_IDS.values()}
    for id in range(small.num_ranks, small.vocab_size):
        name = small.special_name(id)
        assert name is not None
        if id not in official_named:
            assert name == f"<|reserved_token_{id}|>"
        assert small.special_id(name) == id
        assert small.encode_segments([Segment("control", name)]) == [id]
        assert small.decode([id]) == name
        assert small.token_bytes(id) == name.encode()
    assert small.special_name(0) is None


def test_every_id_decodes_to_its_bytes(full: Tokenizer, full_ranks: list[bytes]) -> None:
    for id, token in enumerate(full_ranks):
        assert full.token_bytes(id) == token
        assert full.decode([id]) == token.decode("utf-8", "replace")
    for id in range(full.num_ranks, full.vocab_size):
        assert full.decode([id])


@pytest.mark.parametrize("id", [-1, 2256 + 256, 10**9])
def test_an_id_outside_the_vocabulary_is_refused_by_name(small: Tokenizer, id: int) -> None:
    push = StreamDecoder(small).push
    calls: list[Callable[[], object]] = [
        lambda: small.token_bytes(id),
        lambda: small.decode([0, id]),
        lambda: small.special_name(id),
        lambda: push(id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"token id {id} is outside"):
            call()


def test_an_unknown_special_name_is_refused(small: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"no special token is named '<\|im_user\|>'"):
        small.special_id("<|im_user|>")
    with pytest.raises(ValueError, match="no special token"):  # K3's id, not this vocabulary's
        small.special_id("<|reserved_token_163592|>")


# ---- segments ----


def test_segments_are_encoded_alone(small: Tokenizer) -> None:
    texts = ["message", " role", '="', "user", '"', "", "<|open|>"]
    control = small.special_id("<|open|>")
    segments = [Segment("control", "<|open|>"), *(Segment("text", text) for text in texts)]
    expected = [control, *(id for text in texts for id in small.encode(text))]
    assert small.encode_segments(segments) == expected
    assert control not in expected[1:]


def test_a_control_segment_mixes_specials_and_text(small: Tokenizer) -> None:
    begin, content, pad, end = (
        small.special_id(f"<|media_{part}|>") for part in ("begin", "content", "pad", "end")
    )
    text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    expected = [begin, *small.encode("image"), content, pad, end]
    assert small.encode_segments([Segment("control", text)]) == expected


@pytest.mark.parametrize("text", ["", "<|im_user|>", "message"])
def test_a_control_segment_without_a_special_is_refused(small: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match="control segment should hold"):
        small.encode_segments([Segment("control", text)])


# ---- streaming ----


def assert_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    """For every prefix: pushes and finish joined are decode, and so is Python's own decoder."""
    for length in range(len(ids) + 1):
        prefix = ids[:length]
        stream = StreamDecoder(tokenizer)
        certain = "".join(map(stream.push, prefix))
        data = b"".join(map(tokenizer.token_bytes, prefix))
        expected = data.decode("utf-8", "replace")
        # What is held back is at most one unfinished character, which may still become whole.
        assert expected.startswith(certain)
        assert certain == codecs.utf_8_decode(data, "replace", False)[0]
        assert certain + stream.finish() == expected == tokenizer.decode(prefix)


def test_stream_of_text_is_decode_at_every_prefix(small: Tokenizer) -> None:
    texts = [
        "漢字とかな 한국어",
        "👩\u200d💻👨\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈",
        "a\u0301e\u0308\u0323 हिन्दी ไทย",
        *fuzz_texts(3, 60),
    ]
    for text in texts:
        assert_streams(small, small.encode(text)[:80])
        assert_streams(small, byte_ids(small, text.encode()[:80]))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte, which is how a model can spell any bytes."""
    by_byte = {tokenizer.token_bytes(id): id for id in range(tokenizer.num_ranks)}
    return [by_byte[bytes([byte])] for byte in data]


BYTES_ONLY = Tokenizer([bytes([byte]) for byte in range(256)])

# The borders of the classes of bytes in the definition of UTF-8.
BORDER_BYTES = bytes.fromhex("41 7f 80 8f 90 9f a0 bf c1 c2 e0 e1 ed f0 f4 f5 ff")


def test_stream_of_bytes_is_decode_for_every_short_sequence(small: Tokenizer) -> None:
    ids = byte_ids(small, BORDER_BYTES)
    for sequence in itertools.product(ids, repeat=4):
        stream = StreamDecoder(small)
        text = "".join(map(stream.push, sequence)) + stream.finish()
        assert text == small.decode(sequence)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([bytes([byte]) for byte in BORDER_BYTES]),
            st.binary(min_size=1, max_size=3),
            st.text(max_size=3).map(lambda text: text.encode()),
        ),
        max_size=12,
    )
)
def test_stream_of_random_bytes_is_decode_at_every_prefix(parts: list[bytes]) -> None:
    assert_streams(BYTES_ONLY, byte_ids(BYTES_ONLY, b"".join(parts)))


def test_stream_of_random_ids_is_decode_at_every_prefix(small: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(60):
        ids = rng.choices(range(small.vocab_size), k=rng.randint(0, 40))
        assert_streams(small, ids)


def test_a_whole_character_is_not_held_back() -> None:
    stream = StreamDecoder(BYTES_ONLY)
    pushed = [stream.push(id) for id in byte_ids(BYTES_ONLY, "é中👍a".encode() + b"\xe4\xb8!")]
    assert pushed == ["", "é", "", "", "中", "", "", "", "👍", "a", "", "", "\ufffd!"]
    assert stream.finish() == ""


def test_finish_replaces_one_unfinished_character_once_and_only_once() -> None:
    stream = StreamDecoder(BYTES_ONLY)
    assert [stream.push(id) for id in b"\xf0\x9f\x91"] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    with pytest.raises(AssertionError, match="finish called twice"):
        stream.finish()
    with pytest.raises(AssertionError, match="push after finish"):
        stream.push(65)


# ---- files ----


def rank_lines() -> list[bytes]:
    return [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]


def test_ranks_may_stand_in_any_order(tmp_path: Path) -> None:
    lines = [*rank_lines(), b"", base64.b64encode(b"ab") + b" 256"]
    random.Random(5).shuffle(lines)
    path = tmp_path / "ranks"
    path.write_bytes(b"\r\n".join(lines))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.num_ranks == 257
    assert tokenizer.encode("abc") == [256, ord("c")]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"YWI 256", "line 257 should be a base64 token"),  # padding is missing
        (b"Y*I= 256", "line 257 should be a base64 token"),
        (b"YWI=", "line 257 should be a base64 token"),
        (b"YWI= x", "line 257 should be a base64 token"),
        (b"YWI= 256 1", "line 257 should be a base64 token"),
        (b"version https://git-lfs.github.com/spec/v1", "line 257 should be a base64 token"),
        (b"YWI= 255", "line 257 should bring a new token and a new rank"),
        (b"YQ== 256", "line 257 should bring a new token and a new rank"),
        (b"YWI= 257", "ranks 0 to 256 were expected, but rank 256 is missing"),
        (b"YWI= -1", "rank 256 is missing"),
    ],
)
def test_a_malformed_rank_file_is_refused(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "ranks"
    path.write_bytes(b"\n".join([*rank_lines(), line]))
    with pytest.raises(ValueError, match=problem):
        Tokenizer.load(path)


def test_a_rank_file_without_every_single_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    path.write_bytes(b"\n".join(rank_lines()[:255]))
    with pytest.raises(ValueError, match="rank for every single byte, but 0xff has none"):
        Tokenizer.load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0x00 has none"):
        Tokenizer.load(path)


def test_a_missing_rank_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model does not exist"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        Tokenizer.load(tmp_path / "absent")


def model_directory(path: Path, config: object) -> Path:
    write_ranks(path / "tiktoken.model", [bytes([byte]) for byte in range(256)])
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def published_names() -> dict[str, dict[str, object]]:
    return {
        str(256 + id - 163584): {"content": name, "special": True}
        for name, id in OFFICIAL_IDS.items()
    }


def test_a_model_directory_loads_with_and_without_its_config(tmp_path: Path) -> None:
    names = published_names() | {"264": {"content": "<|reserved_token_264|>"}}
    directory = model_directory(tmp_path, {"added_tokens_decoder": names})
    assert Tokenizer.load(directory).special_id("<|open|>") == 259
    (directory / "tokenizer_config.json").unlink()
    assert Tokenizer.load(directory).special_id("<|open|>") == 259


@pytest.mark.parametrize(
    ("id", "name", "problem"),
    [
        (
            "258",
            "<|im_end|>",
            r"name id 258 as K3 does, '<\|end_of_msg\|>', and has '<\|im_end\|>'",
        ),
        ("258", None, r"name id 258 as K3 does, '<\|end_of_msg\|>', and has nothing"),
        ("264", "<|tool|>", r"id 264 as K3 does, '<\|reserved_token_264\|>', and has '<\|tool"),
        ("512", "<|im_user|>", "id 512 as K3 does, no special token, and has"),
        ("7", "<|open|>", "id 7 as K3 does, no special token, and has"),
    ],
)
def test_a_config_that_names_specials_otherwise_is_refused(
    tmp_path: Path, id: str, name: str | None, problem: str
) -> None:
    names = published_names()
    names.pop(id, None)
    if name is not None:
        names[id] = {"content": name}
    with pytest.raises(ValueError, match=problem):
        Tokenizer.load(model_directory(tmp_path, {"added_tokens_decoder": names}))


@pytest.mark.parametrize(
    "config",
    [
        {},
        [],
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"256": "[BOS]"}},
    ],
)
def test_a_config_of_another_form_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config\.json should be JSON whose"):
        Tokenizer.load(model_directory(tmp_path, config))
