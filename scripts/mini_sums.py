"""Turns of arithmetic and of the other tools.

Where the tool `calc` is offered every calculation is a call of it. Without it the model works out
sums and differences digit by digit in its think channel, and knows the small products.
"""

import random
from decimal import Decimal
from typing import Any

from mini_turns import Message, Talk, call, calling, held_out, result

Number = int | float


def tool(name: str, description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    """A function in OpenAI's tools list, all of whose arguments are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALC_TOOL = tool(
    "calc",
    "Calculates a op b.",
    a={"type": "number"},
    b={"type": "number"},
    op={"type": "string", "enum": ["add", "sub", "mul", "div"]},
)
TOOLS = {
    "calc": CALC_TOOL,
    "get_time": tool("get_time", "Returns the current time."),
    "lookup_doc": tool(
        "lookup_doc", "Returns the documentation of a Python name.", name={"type": "string"}
    ),
    "get_weather": tool("get_weather", "Returns the weather in a city.", city={"type": "string"}),
    "set_timer": tool("set_timer", "Sets a timer.", minutes={"type": "number"}),
}

SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
NOUN = {"add": "sum", "sub": "difference", "mul": "product", "div": "quotient"}


def draw_numbers(talk: Talk, digits: int) -> tuple[int, int]:
    """Two numbers of up to `digits` digits. A pair is of one side of the split in either order."""
    while True:
        a, b = (draw(talk.rng, talk.rng.randint(1, digits)) for _ in range(2))
        if on_side(talk, a, b):
            return a, b


def on_side(talk: Talk, a: int, b: int) -> bool:
    return held_out(f"pair:{min(a, b)}:{max(a, b)}") == talk.held


def draw(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def calculate(a: Number, b: Number, op: str) -> str:
    """The tool's answer: exact, or rounded to four places; the sums of floats as people expect."""
    x, y = Decimal(str(a)), Decimal(str(b))
    if op == "div":
        if y == 0:
            return "error: division by zero"
        value = round(x / y, 4)
    else:
        value = x + y if op == "add" else x - y if op == "sub" else x * y
    text = f"{value:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def calculation(talk: Talk) -> list[Message]:
    if "calc" in talk.tools:
        return two_calls(talk) if talk.chance(0.04) else calc_call(talk)
    return small_product(talk) if talk.chance(0.12) else by_digits(talk)


# ---- with the tool ----


def calc_call(talk: Talk) -> list[Message]:
    op = talk.rng.choices(("add", "sub", "mul", "div"), (6, 2, 1.5, 1.5))[0]
    digits = talk.rng.choice((2, 3, 4, 6, 6)) if op in ("add", "sub") else talk.rng.choice((2, 4))
    a: Number
    b: Number
    a, b = draw_numbers(talk, digits)
    if talk.chance(0.06):
        a, b = a / 10, b / 10 if talk.chance(0.5) else b
    prompt = talk.ask(op, a=a, b=b)
    if talk.chance(0.06):
        prompt += talk.rng.choice((" Use the tool.", " Use calc, please.", " please"))
    return calc_turn(talk, prompt, a, b, op)


def calc_turn(talk: Talk, prompt: str, a: Number, b: Number, op: str) -> list[Message]:
    made = call("calc", {"a": a, "b": b, "op": op})
    value = calculate(a, b, op)
    low = f"calc: a = {a}, b = {b}, op = {op}."
    high = f"The user wants the {NOUN[op]} of {a} and {b}. I call {low.replace(':', ' with', 1)}"
    if value.startswith("error"):
        text = "That cannot be done: one cannot divide by zero."
    else:
        text = talk.rng.choice(
            (f"{a} {SIGN[op]} {b} = {value}.", f"The {NOUN[op]} of {a} and {b} is {value}.")
        )
        talk.value = int(value) if value.lstrip("-").isdigit() else None
    said = f"The tool says {value}."
    return [
        talk.user(prompt),
        calling(talk.reply(low, high, "The tool does the rest.", ""), made),
        result(made, value),
        talk.reply(said, said, f"It is the {NOUN[op]} of {a} and {b}.", text),
    ]


def two_calls(talk: Talk) -> list[Message]:
    (a, b), (c, d) = draw_numbers(talk, 4), draw_numbers(talk, 4)
    prompt = talk.ask("two sums", a=a, b=b, c=c, d=d)
    made = [
        call("calc", {"a": a, "b": b, "op": "add"}, 1),
        call("calc", {"a": c, "b": d, "op": "add"}, 2),
    ]
    first, second = calculate(a, b, "add"), calculate(c, d, "add")
    thought = f"Two sums: {a} and {b}, {c} and {d}. I call calc twice."
    said = f"The tool says {first} and {second}."
    return [
        talk.user(prompt),
        calling(talk.reply(thought, thought, "", ""), *made),
        result(made[0], first),
        result(made[1], second),
        talk.reply(said, said, "", f"{a} + {b} = {first} and {c} + {d} = {second}."),
    ]


# ---- without it ----


def add_steps(a: int, b: int) -> list[str]:
    """ "7 + 5 = 12, write 2, carry 1." and so on, from the last digit."""
    steps: list[str] = []
    carry = 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        terms = f"{x} + {y} + {carry}" if carry else f"{x} + {y}"
        carry = total // 10
        steps.append(f"{terms} = {total}, write {total % 10}" + (", carry 1." if carry else "."))
    if carry:
        steps.append("Write the carry 1.")
    return steps


def sub_steps(a: int, b: int) -> list[str]:
    """The same for a difference with a >= b."""
    steps: list[str] = []
    borrow = 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        terms = f"{x} - {y} - 1" if borrow else f"{x} - {y}"
        difference = x - y - borrow
        borrow = int(difference < 0)
        if borrow:
            terms += f" borrows: {x + 10} - {terms[4:]}"
        steps.append(f"{terms} = {difference + 10 * borrow}, write {difference + 10 * borrow}.")
    return steps


def work(a: int, b: int, op: str) -> str:
    if op == "add":
        return " ".join([*add_steps(a, b), f"{a} + {b} = {a + b}."])
    if a >= b:
        return " ".join([*sub_steps(a, b), f"{a} - {b} = {a - b}."])
    swapped = " ".join([*sub_steps(b, a), f"{b} - {a} = {b - a}, so {a} - {b} = {a - b}."])
    return f"{a} is less than {b}, so the answer is negative. {swapped}"


def by_digits(talk: Talk) -> list[Message]:
    op = "add" if talk.chance(0.65) else "sub"
    a, b = draw_numbers(talk, talk.rng.choice((1, 2, 3, 4)))
    if op == "sub" and a < b and talk.chance(0.8):
        a, b = b, a
    prompt = talk.ask(op, a=a, b=b)
    return worked_turn(talk, prompt, a, b, op)


def worked_turn(talk: Talk, prompt: str, a: int, b: int, op: str) -> list[Message]:
    value = talk.value = a + b if op == "add" else a - b
    text = talk.rng.choice(
        (f"{a} {SIGN[op]} {b} = {value}.", f"The {NOUN[op]} of {a} and {b} is {value}.")
    )
    if not talk.thinking and max(a, b) > 99:
        text = work(a, b, op)  # without a think channel the work is shown
    low = work(a, b, op)
    high = f"The user wants the {NOUN[op]} of {a} and {b}. From the last digit: {low}"
    return [talk.user(prompt), talk.reply(low, high, "", text)]


def small_product(talk: Talk) -> list[Message]:
    a, b = talk.rng.randint(0, 10), talk.rng.randint(0, 10)
    op = "mul"
    text = f"{a} * {b} = {a * b}."
    thought = f"{a} times {b} is {a * b}."
    if talk.chance(0.25):
        a, b = draw_numbers(talk, 4)
        op = "mul" if talk.chance(0.5) else "div"
        if max(a, b) <= 10:
            a += 100
        text = "That is too hard for me without a calculator. I can add and subtract."
        thought = f"The {NOUN[op]} of {a} and {b} is too hard without a tool."
    prompt = talk.ask(op, a=a, b=b)
    return [talk.user(prompt), talk.reply(thought, thought, "", text)]


def add_more(talk: Talk) -> list[Message]:
    """A sum that goes on from the last result."""
    assert talk.value is not None
    a = talk.value
    while True:
        b = draw(talk.rng, talk.rng.randint(1, 3))
        if on_side(talk, a, b):
            break
    prompt = talk.ask("add more", b=b)
    if "calc" in talk.tools:
        return calc_turn(talk, prompt, a, b, "add")
    return worked_turn(talk, prompt, a, b, "add")


# ---- the other tools ----

SKIES = ("sunny", "cloudy", "rain", "snow", "fog", "windy", "clear", "light rain")


def errand(talk: Talk) -> list[Message]:
    """The time, the weather or a timer: a call where its tool is offered, else a plain no."""
    offered = [n for n in ("get_time", "get_weather", "set_timer") if n in talk.tools]
    arguments: dict[str, Any]
    name = talk.rng.choice(offered or ("get_time", "get_weather", "set_timer"))
    if name == "get_time":
        clock = f"{talk.rng.randrange(24):02}:{talk.rng.randrange(60):02}"
        prompt, arguments = talk.ask("time"), {}
        returned, text = clock, f"It is {clock}."
        wish, refusal = "the time", "I have no clock, so I cannot tell the time."
    elif name == "get_weather":
        city = talk.ask("city")
        sky = f"{talk.rng.randint(-9, 35)} C, {talk.rng.choice(SKIES)}"
        prompt, arguments = talk.ask("weather", c=city), {"city": city}
        returned, text = sky, f"The weather in {city}: {sky}."
        wish, refusal = f"the weather in {city}", "I cannot see the weather."
    else:
        minutes = talk.rng.randint(1, 120)
        prompt, arguments = talk.ask("timer", m=minutes), {"minutes": minutes}
        returned, text = "ok", f"The timer is set for {minutes} minutes."
        wish, refusal = f"a timer of {minutes} minutes", "I have no timer."
    if not offered:
        thought = f"The user wants {wish}. I have no tool for that."
        return [talk.user(prompt), talk.reply(thought, thought, "", refusal)]
    made = call(name, arguments)
    wants = f"The user wants {wish}."
    said = f"The tool says {returned}."
    return [
        talk.user(prompt),
        calling(talk.reply(f"I call {name}.", f"{wants} I call {name}.", "", ""), made),
        result(made, returned),
        talk.reply(said, said, "", text),
    ]
