"""Whole dialogues of k3-mini: settings, a system message perhaps, and one to four turns.

`generate` makes one dialogue for a seed, of the training or the held-out side; no held-out phrase,
rare name or pair of numbers to add is in a training dialogue. `heldout_prompts` are the prompts
that the finished model is judged by.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_docs import documentation, follow_up, foreign
from mini_facts import load, load_phrases
from mini_sums import TOOLS, add_more, calculation, draw_numbers, errand
from mini_text import Entry
from mini_turns import Message, Talk, World, load_topics, names, small_talk

Turn = Callable[[Talk], list[Message]]
# Shares of the kinds of turn, without and with calc on offer.
PLAIN: dict[Turn, float] = {
    documentation: 55, calculation: 17, small_talk: 20, names: 2, foreign: 2, errand: 2
}  # fmt: skip
WITH_CALC: dict[Turn, float] = {
    documentation: 14, calculation: 70, small_talk: 10, names: 1, foreign: 1, errand: 2
}  # fmt: skip
WITH_OTHERS: dict[Turn, float] = {
    documentation: 30, calculation: 12, small_talk: 14, names: 1, foreign: 2, errand: 28
}  # fmt: skip


@dataclass(frozen=True)
class Dialogue:
    """Messages and what `render` needs beside them."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    thinking: bool
    thinking_effort: str | None


def build_world(library: list[Entry]) -> World:
    return World(load(library), load_topics(), load_phrases())


def choose_tools(rng: random.Random) -> list[str]:
    kind = rng.random()
    if kind < 0.56:
        return []
    if kind < 0.78:
        return ["calc"]
    others = rng.sample([n for n in TOOLS if n != "calc"], rng.choice((1, 1, 2)))
    chosen = [*others, "calc"] if kind < 0.90 else others
    rng.shuffle(chosen)
    return chosen


def start(rng: random.Random, world: World, held: bool) -> Talk:
    talk = Talk(rng, world, held, thinking=rng.random() < 0.86)
    if talk.thinking:
        talk.effort = rng.choices(("max", "high", "low", None), (62, 12, 14, 12))[0]
    else:
        talk.effort = None
    talk.tools = choose_tools(rng)
    return talk


def choose_turn(talk: Talk) -> Turn:
    if talk.fact is not None and talk.chance(0.35):
        return follow_up
    if talk.value is not None and 0 <= talk.value < 10**6 and talk.chance(0.3):
        return add_more
    if talk.user_name is not None and talk.chance(0.3):
        return names
    shares = WITH_CALC if "calc" in talk.tools else WITH_OTHERS if talk.tools else PLAIN
    return talk.rng.choices(list(shares), list(shares.values()))[0]


def generate(world: World, seed: str, held: bool) -> Dialogue:
    """One dialogue; the same for the same seed, world and side of the split."""
    rng = random.Random(seed)
    talk = start(rng, world, held)
    messages: list[Message] = []
    if rng.random() < 0.18:
        talk.style = rng.choice(("plain", "brief", "brief", "example"))
        messages.append({"role": "system", "content": talk.ask(f"style {talk.style}")})
    for _ in range(rng.choices((1, 2, 3, 4), (66, 20, 9, 5))[0]):
        messages += choose_turn(talk)(talk)
    tools = [TOOLS[name] for name in talk.tools]
    return Dialogue(messages, tools, talk.thinking, talk.effort)


def as_prompt(dialogue: Dialogue, messages: list[Message]) -> dict[str, Any]:
    options = {"thinking": dialogue.thinking, "thinking_effort": dialogue.thinking_effort}
    return {"messages": messages, "tools": dialogue.tools, "options": options}


def heldout_prompts(world: World, count: int, sums: int) -> dict[str, list[dict[str, Any]]]:
    """`count` prompts of mixed kinds, and `sums` two-number sums with calc on offer.

    Each prompt ends where the assistant is to go on: after a user's message or a tool's result.
    """
    prompts: list[dict[str, Any]] = []
    for i in range(count):
        dialogue = generate(world, f"prompt {i}", held=True)
        replies = [j for j, m in enumerate(dialogue.messages) if m["role"] == "assistant"]
        # The last turn's first reply, or for every fourth prompt its last.
        users = [j for j, m in enumerate(dialogue.messages) if m["role"] == "user"]
        end = replies[-1] if i % 4 == 0 else users[-1] + 1
        prompts.append(as_prompt(dialogue, dialogue.messages[:end]))
    asked: list[dict[str, Any]] = []
    for i in range(sums):
        rng = random.Random(f"sum {i}")
        talk = Talk(rng, world, held=True, tools=["calc"])
        a, b = draw_numbers(talk, rng.choice((2, 3, 4, 6)))
        message = {"role": "user", "content": rng.choice(world.phrases["add"]).format(a=a, b=b)}
        settings = Dialogue([message], [TOOLS["calc"]], True, "max")
        asked.append(as_prompt(settings, [message]) | {"a": a, "b": b, "op": "add"})
    return {"prompts": prompts, "sums": asked}
