"""Makes the training data of k3-mini, and its tokenizer's rank file where there is none yet.

    python scripts/mini_data.py OUT_DIR                # 80 M tokens of dialogues, two minutes
    python scripts/mini_data.py OUT_DIR --tokens 5M --new-ranks

OUT_DIR gets `data.npz` and `heldout_data.npz`, each with these arrays, and `heldout_prompts.json`:

    text     [N] uint16   documents, one after another, each ended by [EOS]
    dialogue [M] uint16   dialogues as the model sees them, one after another
    mask     [M] uint8    1 where the token is the assistant's to say
    starts   [D] int64    where each dialogue begins

Text is Python's own (PSF licence), see `mini_text.py`; dialogues are generated from it and from
the tables beside this script. Everything is drawn from fixed seeds. The rank file belongs to the
trained weights: `--new-ranks` makes a new one, which no older checkpoint can be used with.
"""

import argparse
import base64
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from mini_dialogues import Dialogue, build_world, generate, heldout_prompts
from mini_text import entries, gather
from mini_turns import World, held_out
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BPETokenizer

from nanok3.chat import END_OF_MSG, SEP, Segment, render
from nanok3.tokenizer import RANK_FILE, SPLIT_PATTERN, Tokenizer, byte_alphabet

ROOT = Path(__file__).parent.parent
MODEL_DIR = ROOT / "nanok3" / "models" / "k3_mini"
TEST_PROMPTS = ROOT / "tests" / "data" / "mini_heldout.json"
NUM_RANKS = 3328
MAX_DIALOGUE = 640  # tokens; the few longer ones are dropped
ASSISTANT = ["message", " role", '="', "assistant"]  # the texts that open the assistant's message


def segments_of(dialogue: Dialogue) -> list[Segment]:
    return render(
        dialogue.messages,
        dialogue.tools,
        thinking=dialogue.thinking,
        thinking_effort=dialogue.thinking_effort,
        add_generation_prompt=False,
    )


# ---- the rank file ----


def sample(world: World, documents: Sequence[str]) -> Iterator[str]:
    """What the ranks are learnt from: the text, and about as much of dialogues by segment."""
    yield from documents
    wanted = sum(map(len, documents))
    count = 0
    while wanted > 0:
        for segment in segments_of(generate(world, f"ranks {count}", held=False)):
            if segment.kind == "text":
                wanted -= len(segment.text)
                yield segment.text
        count += 1


def train_ranks(texts: Iterator[str]) -> list[bytes]:
    """Byte-level BPE by K3's split, except that digits stay single so that sums can be learnt."""
    bpe = BPETokenizer(models.BPE())
    digits_alone = SPLIT_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
    assert digits_alone != SPLIT_PATTERN
    split = pre_tokenizers.Split(Regex(digits_alone), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_RANKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=20,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    to_byte = {character: byte for byte, character in byte_alphabet().items()}
    ranks = [bytes([byte]) for byte in range(256)]
    seen = set(ranks)
    for left, right in json.loads(bpe.to_str())["model"]["merges"]:
        token = bytes(to_byte[ord(c)] for c in left + right)
        if token not in seen:  # two merges may spell the same token
            seen.add(token)
            ranks.append(token)
    if len(ranks) != NUM_RANKS:
        raise SystemExit(f"expected {NUM_RANKS} ranks, found {len(ranks)}; the text is too short")
    return ranks


def write_ranks(path: Path, ranks: Sequence[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    path.write_text("".join(lines))


# ---- encoding ----


class Encoder:
    """Ids of documents and dialogues; remembers segments, most of which come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.segment = lru_cache(maxsize=300_000)(self._segment)

    def _segment(self, segment: Segment) -> list[int]:
        return self.tokenizer.encode_segments([segment])

    def documents(self, texts: Sequence[str]) -> np.ndarray:
        ids = array("H")
        end = self.tokenizer.special_id("[EOS]")
        for text in texts:
            ids.extend(self.tokenizer.encode(text))
            ids.append(end)
        return np.asarray(ids, np.uint16)

    def dialogue(self, segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
        """Ids and the mask of what the assistant says, from after its generation prompt."""
        ids: list[int] = []
        mask: list[int] = []
        seps = (
            0  # markers to pass before the assistant speaks: of message, and of think or response
        )
        speaking = 0
        for i, segment in enumerate(segments):
            piece = self.segment(segment)
            ids += piece
            mask += [speaking] * len(piece)
            if segment.kind == "control":
                if segment.text == END_OF_MSG:
                    speaking = 0
                elif segment.text == SEP and seps:
                    seps -= 1
                    speaking = int(seps == 0)
            elif [s.text for s in segments[i - 3 : i + 1]] == ASSISTANT:
                seps = 2
        return ids, mask

    def dialogues(self, world: World, wanted: int, held: bool) -> dict[str, np.ndarray]:
        """Dialogues of at least `wanted` tokens together."""
        ids, mask, starts = array("H"), array("B"), array("q")
        side = "held" if held else "train"
        count = 0
        while len(ids) < wanted:
            more, said = self.dialogue(segments_of(generate(world, f"{side} {count}", held)))
            count += 1
            if len(more) <= MAX_DIALOGUE:
                starts.append(len(ids))
                ids.extend(more)
                mask.extend(said)
        return {
            "dialogue": np.asarray(ids, np.uint16),
            "mask": np.asarray(mask, np.uint8),
            "starts": np.asarray(starts, np.int64),
        }


def save(path: Path, text: np.ndarray, dialogues: dict[str, np.ndarray]) -> None:
    np.savez_compressed(
        path,
        text=text,
        dialogue=dialogues["dialogue"],
        mask=dialogues["mask"],
        starts=dialogues["starts"],
    )
    lengths = np.diff(dialogues["starts"], append=len(dialogues["dialogue"]))
    print(
        f"{path}: {path.stat().st_size / 2**20:.1f} MiB, text {len(text) / 1e6:.2f} M tokens, "
        f"{len(lengths)} dialogues of {len(dialogues['dialogue']) / 1e6:.2f} M tokens, mean "
        f"{lengths.mean():.0f}, longest {lengths.max()}, the assistant's "
        f"{dialogues['mask'].mean():.0%}",
        file=sys.stderr,
    )


def count_of(text: str) -> int:
    """ "120M" -> 120000000."""
    unit = {"K": 1000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    return int(float(text.rstrip("kKmM")) * unit)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--tokens", type=count_of, default=80_000_000, help="of dialogues, as 80M")
    parser.add_argument("--new-ranks", action="store_true", help="train the rank file anew")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    library = entries()
    documents = gather(library)
    train_documents = [text for text in documents if not held_out(f"text:{text}", percent=3)]
    test_documents = [text for text in documents if held_out(f"text:{text}", percent=3)]
    world = build_world(library)
    print(f"{len(world.common)} common and {len(world.rare)} other names", file=sys.stderr)

    rank_file = MODEL_DIR / RANK_FILE
    if args.new_ranks or not rank_file.exists():
        write_ranks(rank_file, train_ranks(sample(world, train_documents)))
        print(f"wrote {rank_file}", file=sys.stderr)
    encoder = Encoder(Tokenizer.load(rank_file))

    prompts = json.dumps(heldout_prompts(world, 200, 100), separators=(",", ":"))
    (args.out / "heldout_prompts.json").write_text(prompts)
    TEST_PROMPTS.write_text(prompts + "\n")
    test = encoder.dialogues(world, 400_000, held=True)
    save(args.out / "heldout_data.npz", encoder.documents(test_documents), test)
    train = encoder.dialogues(world, args.tokens, held=False)
    save(args.out / "data.npz", encoder.documents(train_documents), train)


if __name__ == "__main__":
    main()
