"""The data of k3-mini: right arithmetic, a mask on what the assistant says, a clean split."""

import json
import re
import sys
from pathlib import Path

import pytest

from nanok3.chat import render
from nanok3.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import mini_data  # noqa: E402
import mini_dialogues  # noqa: E402
import mini_facts  # noqa: E402
import mini_sums  # noqa: E402
import mini_text  # noqa: E402
from mini_turns import World, held_out  # noqa: E402


@pytest.fixture(scope="module")
def world() -> World:
    return mini_dialogues.build_world(mini_text.entries())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(mini_data.MODEL_DIR / "tiktoken.model")


PAIRS = ((0, 0), (7, 5), (999, 1), (347, 85), (1000, 1), (4021, 987), (5, 5), (3, 8), (12, 3400))


@pytest.mark.parametrize(("a", "b"), PAIRS)  # carries, borrows, zeros, a < b
def test_written_digits_give_the_result(a: int, b: int) -> None:
    total = "".join(
        re.findall(r"write (?:the carry )?(\d)", " ".join(mini_sums.add_steps(a, b)), re.I)
    )
    assert int(total[::-1]) == a + b
    high, low = max(a, b), min(a, b)
    rest = "".join(re.findall(r"write (\d)", " ".join(mini_sums.sub_steps(high, low))))
    assert int(rest[::-1]) == high - low


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_step_of_a_sum_holds(a: int, b: int) -> None:
    for op in ("add", "sub"):
        for left, right in re.findall(r"((?:\d+ [+-] )+\d+) = (-?\d+)", mini_sums.work(a, b, op)):
            assert eval(left) == int(right)


def test_calculate() -> None:
    found = [mini_sums.calculate(a, b, op) for a, b, op in ((0.1, 0.2, "add"), (7, 2, "div"))]
    assert found == ["0.3", "3.5"]
    assert mini_sums.calculate(100, 20, "mul") == "2000"
    assert mini_sums.calculate(3, 0, "div") == "error: division by zero"


def test_docstring_sentences_turn_round() -> None:
    assert mini_facts.predicate("Return the sum.", "function") == "returns the sum"
    assert mini_facts.predicate("Copy and close it.", "function") == "copies and closes it"
    assert mini_facts.predicate("Base class for pools.", "class") == "is a base class for pools"
    assert mini_facts.predicate("Whatever it is.", "function") is None
    assert mini_facts.parse_arguments("(self, src, *, deep=True)") == ["src", "deep (default True)"]


def test_mask_covers_what_follows_the_generation_prompt(world: World, tokenizer: Tokenizer) -> None:
    encoder = mini_data.Encoder(tokenizer)
    for seed in range(60):
        dialogue = mini_dialogues.generate(world, f"mask {seed}", held=False)
        ids, mask = encoder.dialogue(mini_data.segments_of(dialogue))
        assert ids == tokenizer.encode_segments(mini_data.segments_of(dialogue))
        expected = [0] * len(ids)
        for i, message in enumerate(dialogue.messages):
            if message["role"] == "assistant":
                options = {
                    "thinking": dialogue.thinking,
                    "thinking_effort": dialogue.thinking_effort,
                }
                begin, end = (
                    len(tokenizer.encode_segments(render(part, dialogue.tools, **options, **more)))
                    for part, more in (
                        (dialogue.messages[:i], {}),
                        (dialogue.messages[: i + 1], {"add_generation_prompt": False}),
                    )
                )
                expected[begin:end] = [1] * (end - begin)
        assert mask == expected


def test_training_dialogues_hold_nothing_held_out(world: World) -> None:
    held_phrases = {p for t in world.topics for p in t.prompts if held_out(f"talk:{p}")}
    held_names = {f.name for f in world.rare if held_out(f"fact:{f.name}")}
    assert held_phrases and held_names
    for seed in range(1500):
        for message in mini_dialogues.generate(world, f"train {seed}", held=False).messages:
            content = message["content"]
            assert content not in held_phrases
            assert content.split(" ")[0] not in held_names
            for call in message.get("tool_calls", []):
                made = json.loads(call["function"]["arguments"])
                if (
                    made.get("op") == "add"
                    and isinstance(made["a"], int)
                    and made["b"] == int(made["b"])
                ):
                    low, high = sorted((made["a"], made["b"]))
                    assert not held_out(f"pair:{low}:{high}")


def test_heldout_prompts_can_be_made_again(world: World) -> None:
    stored = json.loads(mini_data.TEST_PROMPTS.read_text())
    made = mini_dialogues.heldout_prompts(world, 200, 100)
    assert json.loads(json.dumps(made["sums"])) == stored["sums"]
    assert len(stored["prompts"]) == 200
    assert all(p["messages"][-1]["role"] in ("user", "tool") for p in stored["prompts"])
    assert all(p["tools"] == [mini_sums.CALC_TOOL] for p in stored["sums"])


def test_ranks_keep_digits_single_and_build_on_lower_ranks(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 3584
    ranks = {tokenizer.token_bytes(i): i for i in range(tokenizer.num_ranks)}
    for token, rank in ranks.items():
        if len(token) > 1:
            assert not re.search(rb"\d", token)
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            assert any(max(ranks.get(a, rank), ranks.get(b, rank)) < rank for a, b in splits)
    assert tokenizer.decode(tokenizer.encode("12345")) == "12345"
    assert len(tokenizer.encode("12345")) == 5
