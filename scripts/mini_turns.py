"""What every kind of turn shares, and the turns of small talk.

A turn is a list of OpenAI-style messages, from the user's to the assistant's last. What all turns
share is in `Talk`: the generator of random numbers, the settings of the dialogue, and the split.
Documentation is in `mini_docs.py`, sums and tools in `mini_sums.py`; whole dialogues are put
together in `mini_dialogues.py`.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mini_facts import Fact, base_clause

TALK_FILE = Path(__file__).with_name("mini_talk.txt")
Message = dict[str, Any]


def held_out(key: str, percent: int = 6) -> bool:
    """Whether a phrase, a name or a pair of numbers is kept from training; the same everywhere."""
    return hashlib.sha256(key.encode()).digest()[0] * 100 < percent * 256


@dataclass
class Topic:
    """A block of mini_talk.txt."""

    gist: str  # "greets me"
    prompts: list[str]
    replies: list[str]


@dataclass
class World:
    """All that dialogues are made from; built once."""

    facts: list[Fact]
    topics: list[Topic]
    phrases: dict[str, list[str]]
    how_to: dict[str, Fact] = field(default_factory=dict)  # "join path components" -> os.path.join

    def __post_init__(self) -> None:
        self.common = [fact for fact in self.facts if fact.common]
        shorts = [fact.short for fact in self.common]
        self.unique = {short for short in shorts if shorts.count(short) == 1 and len(short) > 2}
        self.rare = [fact for fact in self.facts if not fact.common]
        for fact in self.common:
            clause = base_clause(fact.says)
            if clause:
                self.how_to.setdefault(clause, fact)


@dataclass
class Talk:
    """One dialogue in the making."""

    rng: random.Random
    world: World
    held: bool  # make it of held-out parts
    thinking: bool = True
    effort: str | None = "max"
    style: str = "plain"  # plain, brief or example, as the system message asks
    tools: list[str] = field(default_factory=list)  # names of the tools on offer
    fact: Fact | None = None  # what was last talked about
    value: int | None = None  # the last sum's result
    user_name: str | None = None

    def pick(self, options: Sequence[str], key: str) -> str:
        """One of the options, of this dialogue's side of the split where it has any."""
        side = [o for o in options if held_out(f"{key}:{o}") == self.held]
        return self.rng.choice(side or list(options))

    def ask(self, kind: str, **fields: object) -> str:
        """A phrase of this kind from mini_phrases.txt, filled in."""
        return self.pick(self.world.phrases[kind], kind).format(**fields)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def user(self, text: str, keep: str = "") -> Message:
        """A user's message, often written carelessly; the word `keep` is never misspelt."""
        return {"role": "user", "content": careless(self.rng, text, keep)}

    def reply(self, low: str, high: str, more: str, content: str) -> Message:
        """The assistant's message. A higher effort thinks more: `more` is added at `max`."""
        message: Message = {"role": "assistant", "content": content}
        if self.thinking:
            thought = {"low": low, "max": f"{high} {more}".strip()}.get(self.effort or "", high)
            message["reasoning_content"] = thought
        return message


def careless(rng: random.Random, text: str, keep: str) -> str:
    if rng.random() < 0.25:
        text = text.lower() if rng.random() < 0.7 or not keep else text[0].lower() + text[1:]
    if rng.random() < 0.25:
        text = text.rstrip("?.!") or text
    if rng.random() < 0.08:
        words = text.split(" ")
        long = [i for i, w in enumerate(words) if w.isalpha() and len(w) > 3 and w not in keep]
        if long:
            i = rng.choice(long)
            at = rng.randrange(1, len(words[i]) - 1)
            w = words[i]
            swapped = w[:at] + w[at + 1] + w[at] + w[at + 2 :]
            words[i] = rng.choice((swapped, w[:at] + w[at + 1 :], w[:at] + w[at] + w[at:]))
            text = " ".join(words)
    return text


# ---- messages ----


def call(name: str, arguments: dict[str, Any], number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"{name}-{number}", "type": "function", "function": function}


def calling(message: Message, *calls: dict[str, Any]) -> Message:
    return message | {"content": "", "tool_calls": list(calls)}


def result(made: dict[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": made["id"], "content": text}


# ---- small talk ----


def load_topics() -> list[Topic]:
    topics: list[Topic] = []
    for line in TALK_FILE.read_text().splitlines():
        mark, _, text = line.partition(" ")
        if mark == "@":
            topics.append(Topic(text, [], []))
        elif mark == ">":
            topics[-1].prompts += text.split(" | ")
        elif mark == "<":
            topics[-1].replies.append(text)
    return topics


SOCIAL = 20  # how many topics from the start of the file are about us rather than about Python


def small_talk(talk: Talk) -> list[Message]:
    topics = talk.world.topics
    topic = talk.rng.choice(topics[:SOCIAL] if talk.chance(0.5) else topics)
    prompt = talk.pick(topic.prompts, "talk")
    more = f"I answer it in {talk.rng.choice(('a sentence', 'one short sentence', 'a few words'))}."
    answer = talk.rng.choice(topic.replies)
    if talk.style == "brief":
        answer = answer.split(". ")[0].rstrip(".") + ("" if answer.endswith(("!", "?")) else ".")
    high = f"The user {topic.gist}."
    return [talk.user(prompt), talk.reply(f"The user {topic.gist}.", high, more, answer)]


def names(talk: Talk) -> list[Message]:
    if talk.user_name is None and talk.chance(0.8):
        name = talk.user_name = talk.ask("person")
        prompt = talk.ask("my name", n=name)
        answer = talk.rng.choice(("Hello {n}! How can I help you?", "Nice to meet you, {n}!"))
        thought = f"The user's name is {name}."
        more = "I greet them by name."
        return [talk.user(prompt, name), talk.reply(thought, thought, more, answer.format(n=name))]
    prompt = talk.ask("ask name")
    if talk.user_name is None:
        thought = "The user asks for their name, which they have not told me."
        return [talk.user(prompt), talk.reply(thought, thought, "", "You have not told me.")]
    thought = f"The user asks for their name. They said that it is {talk.user_name}."
    return [talk.user(prompt), talk.reply(thought, thought, "", f"Your name is {talk.user_name}.")]
