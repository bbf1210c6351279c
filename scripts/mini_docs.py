"""Turns about Python's standard library: what a name does, how it is called, where it is.

The model answers from what it knows, or, where the tool `lookup_doc` is offered, from its result.
"""

from collections.abc import Sequence

from mini_facts import Fact, with_s
from mini_turns import Message, Talk, call, calling, held_out, result

# ---- documentation ----


def choose_fact(talk: Talk) -> Fact:
    """A common name mostly. Of the rare ones some are kept from training altogether."""
    if talk.chance(0.62):
        return talk.rng.choice(talk.world.common)
    while True:
        fact = talk.rng.choice(talk.world.rare)
        if held_out(f"fact:{fact.name}") == talk.held:
            return fact


def spell(talk: Talk, fact: Fact) -> str:
    """The name as a user may write it."""
    if fact.kind == "module":
        return f"the {fact.name} module" if talk.chance(0.4) else fact.name
    if talk.chance(0.1) and fact.common and fact.short in talk.world.unique:
        return fact.short
    if talk.chance(0.12) and fact.kind in ("function", "method"):
        return fact.name + "()"
    if talk.chance(0.08) and "." in fact.name:
        return f"{fact.short} in {fact.name.rsplit('.', 1)[0]}"
    return fact.name


def example_of(fact: Fact) -> str:
    if fact.example:
        return f"For example, {fact.example[0]} gives {fact.example[1]}."
    if fact.kind == "module":
        return f"Write import {fact.name} at the top of your program."
    if fact.arguments is not None and fact.kind != "value":
        required = [a for a in fact.arguments if " " not in a and not a.startswith("*")]
        return f"Call it as {fact.name}({', '.join(required)})."
    return f"I have no example of {fact.name}."


def describe(talk: Talk, fact: Fact) -> str:
    sentence = f"{fact.name} {fact.says}."
    wants = talk.style == "example" or (fact.example is not None and talk.style == "plain")
    return f"{sentence} {example_of(fact)}" if wants else sentence


def list_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def arguments_of(fact: Fact) -> str:
    assert fact.arguments is not None
    listed = list_of(fact.arguments) if fact.arguments else "no arguments"
    return f"{fact.name} takes {listed}."


def import_of(fact: Fact) -> str:
    if fact.kind == "module":
        return f"{fact.name} is a module of the standard library: write import {fact.name}."
    if fact.module == "builtins":
        return f"{fact.name} is built in, so you need no import."
    if fact.kind == "method":
        return f"{fact.short} is a method of {fact.name.rsplit('.', 1)[0]}."
    write = f"from {fact.module} import {fact.short}"
    return f"{fact.short} is in the {fact.module} module: write {write}."


def documentation(talk: Talk) -> list[Message]:
    fact = talk.fact = choose_fact(talk)
    if "lookup_doc" in talk.tools:
        return look_up(talk, fact)
    kind = talk.rng.random()
    if kind < 0.62:
        prompt = talk.ask("what", n=spell(talk, fact))
        return answer(talk, fact, prompt, f"The user asks about {fact.name}.", describe(talk, fact))
    if kind < 0.72:
        prompt = talk.ask("example", n=spell(talk, fact))
        text = f"{fact.name} {fact.says}. {example_of(fact)}"
        return answer(talk, fact, prompt, f"The user asks how to use {fact.name}.", text)
    if kind < 0.80 and fact.arguments is not None and fact.kind != "module":
        prompt = talk.ask("arguments", n=spell(talk, fact))
        asked = f"The user asks for the arguments of {fact.name}."
        return answer(talk, fact, prompt, asked, arguments_of(fact))
    if kind < 0.88 and (fact.kind == "module" or fact.common or fact.kind == "function"):
        prompt = talk.ask("where", s=fact.short)
        return answer(talk, fact, prompt, f"The user asks where {fact.short} is.", import_of(fact))
    clause = talk.rng.choice(list(talk.world.how_to))
    fact = talk.fact = talk.world.how_to[clause]
    verb, _, rest = clause.partition(" ")
    prompt = talk.ask("how to", c=clause, v=f"{with_s(verb)} {rest}")
    text = f"Use {fact.name}: it {fact.says}."
    if fact.example and talk.style != "brief":
        text += " " + example_of(fact)
    return answer(talk, fact, prompt, f"The user wants to {clause}.", text)


def answer(talk: Talk, fact: Fact, prompt: str, asked: str, text: str) -> list[Message]:
    subject = f"{fact.name} is {fact.place}."
    thought = f"{asked} {subject}"
    return [talk.user(prompt, fact.name), talk.reply(subject, thought, f"It {fact.says}.", text)]


def follow_up(talk: Talk) -> list[Message]:
    """A question about what was last talked about."""
    fact = talk.fact
    assert fact is not None
    kinds = ["example", "where"] + (["arguments"] if fact.arguments is not None else [])
    kind = talk.rng.choice(kinds)
    prompt = talk.ask(f"follow {kind}")
    thought = f"They still mean {fact.name}, {fact.place}."
    texts = {"example": example_of(fact), "where": import_of(fact)}
    text = texts[kind] if kind in texts else arguments_of(fact)
    return [talk.user(prompt), talk.reply(thought, thought, "", text)]


def foreign(talk: Talk) -> list[Message]:
    """A name that is not of the standard library."""
    name = talk.ask("foreign name")
    prompt = talk.ask("what", n=name)
    thought = f"{name} is not in the standard library."
    text = f"I do not know {name}: it is not in Python's standard library."
    if "lookup_doc" in talk.tools:
        return look_up_unknown(talk, name, prompt)
    return [talk.user(prompt, name), talk.reply(thought, thought, "I say so.", text)]


# ---- documentation through the tool lookup_doc ----


def look_up(talk: Talk, fact: Fact) -> list[Message]:
    prompt = talk.ask("what", n=spell(talk, fact))
    made = call("lookup_doc", {"name": fact.name})
    thought = f"I look up {fact.name}."
    asked = f"The user asks about {fact.name}. There is a tool for that."
    found = f"{fact.name} {fact.says}."
    return [
        talk.user(prompt, fact.name),
        calling(talk.reply(thought, f"{asked} {thought}", "", ""), made),
        result(made, found),
        talk.reply("I have it.", "The tool gave the documentation.", "I pass it on.", found),
    ]


def look_up_unknown(talk: Talk, name: str, prompt: str) -> list[Message]:
    made = call("lookup_doc", {"name": name})
    thought = f"I look up {name}."
    text = f"I found no documentation of {name}."
    return [
        talk.user(prompt, name),
        calling(talk.reply(thought, thought, "The tool may know it.", ""), made),
        result(made, f"no documentation of {name}"),
        talk.reply("Nothing found.", "The tool found nothing.", "I say so.", text),
    ]
