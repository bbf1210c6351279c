"""Reads the PTX of one kernel and turns its basic blocks into Python over numpy.

A register is an array of 32 lanes and is never changed in place; words are kept unsigned. A block
ends at a branch, and before whatever needs the whole warp or may have to wait: these are left to
`machine`, as the block's `end`. Covers the instructions that the kernels here compile to; any other
is a NotImplementedError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx import arithmetic

SHARED_BASE = 1024  # where dynamic shared memory begins: address 0 is not in it
SPECIALS = (
    *("%tid.x", "%laneid", "%cluster_ctarank"),
    *("%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z"),
)
KIND = {"pred": "bool_", "b16": "uint16", "b32": "uint32", "b64": "uint64"}
COMPARE = {"eq": "==", "ne": "!=", "neu": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
# these need all 32 lanes at once
COLLECTIVE = ("shfl", "vote", "redux", "mma", "ldmatrix", "bar", "barrier")
WAITS = (
    "bar.sync",
    "barrier.cluster.wait",
    "mbarrier.try_wait",
    "ld.acquire",
    "ld.relaxed.gpu.global",
)

Lanes = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Statement:
    guard: tuple[int, bool] | None  # a predicate register, and whether it is negated
    name: str
    operands: tuple[str, ...]
    text: str  # with the line of Python near it, if that is known


@dataclass
class Block:
    body: list[Statement] = field(default_factory=list)
    end: Statement | None = None  # a branch, ret, or one of WAITS
    target: int = -1  # of a branch
    collective: bool = False  # needs all lanes
    whole: Callable[..., None] | None = None  # compiled when first run
    masked: Callable[..., None] | None = None


@dataclass
class Program:
    threads: int
    params: list[str]  # "u64" or "u32"
    kinds: list[str]  # numpy type of every register; the SPECIALS come first
    names: dict[str, int]
    blocks: list[Block]
    constants: list[Lanes]

    def function(self, block: Block, masked: bool) -> Callable[..., None]:
        """f(warp, registers, mask): the block's body for all lanes, or for those of the mask."""
        made = block.masked if masked else block.whole
        if made is None:
            lines = [line for s in block.body for line in translate(self, s, masked)]
            source = "def body(w, R, m):\n    " + "\n    ".join(lines or ["pass"])
            scope: dict[str, Any] = {**vars(arithmetic), "np": np, "K": self.constants}
            exec(compile(source, "PTX as Python", "exec"), scope)
            made = scope["body"]
            if masked:
                block.masked = made
            else:
                block.whole = made
        return made

    def read(self, operand: str, kind: str) -> str:
        """Python for an operand as 32 lanes of a PTX type."""
        if operand in self.names:
            index = self.names[operand]
            held, wanted = np.dtype(self.kinds[index]), np.dtype(arithmetic.TYPES[kind])
            assert held.itemsize == wanted.itemsize, f"{operand} is no {kind}"
            return f"R[{index}]" + ("" if held == wanted else f".view('{wanted.name}')")
        if operand.startswith("0f"):
            value = int(operand[2:], 16)
        elif operand == "__dynamic_shmem__0":
            value = SHARED_BASE
        else:
            value = int(operand, 0)
        wanted = np.dtype(arithmetic.TYPES[kind])
        size = wanted.itemsize
        raw = (value % (1 << 8 * size)).to_bytes(size, "little")
        self.constants.append(np.frombuffer(raw * 32, wanted))
        return f"K[{len(self.constants) - 1}]"

    def address(self, operand: str) -> str:
        """Python for `[register + offset]` as 32 lanes of i64."""
        name, _, offset = operand.strip("[]").partition("+")
        bits = "u64" if np.dtype(self.kinds[self.names[name]]).itemsize == 8 else "u32"
        return f"{self.read(name, bits)}.astype('int64')" + (f"+{int(offset)}" if offset else "")


# ---- reading ----


def statements_of(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Labels (`name:`) and instructions, each with the scopes (braces) around it."""
    found, scopes, count = [], [0], 0
    for token in re.findall(r"\s*([$\w]+:(?!:)|[{}]|[^\s;{}](?:[^;{}]|\{[^}]*\})*;)", text):
        if token == "{":
            count += 1
            scopes.append(count)
        elif token == "}":
            scopes.pop()
        else:
            found.append((token.rstrip(";").strip(), tuple(scopes)))
    return found


def read_ptx(text: str) -> Program:
    """The only kernel of a PTX text."""
    text = re.sub(r"//.*", "", text)
    files = {n: name.rpartition("/")[2] for n, name in re.findall(r'\.file\s+(\d+) "(.*)"', text)}
    text = re.sub(r"(\.loc[^\n]*)", r"\1;", text)
    head, body = text[text.index(".visible .entry") :].split("\n{\n", 1)
    threads = re.search(r"\.reqntid (\d+)", head)
    assert threads, "the kernel does not state its number of threads"
    params = re.findall(r"\.param \.(\w+) ", head)
    program = Program(int(threads.group(1)), params, [], {}, [Block()], [])
    for name in SPECIALS:
        declare(program, name, "b32")
    labels: dict[str, int] = {}
    near = ""
    for token, scopes in statements_of(body[: body.rindex("}")]):
        if token.startswith(".reg"):
            declare_all(program, token, scopes)
        elif token.endswith(":"):
            if program.blocks[-1].body or program.blocks[-1].end:
                program.blocks.append(Block())
            labels[scoped(token[:-1], scopes, {})] = len(program.blocks) - 1
        elif token.startswith(".loc"):
            _, file, line, *_ = token.split()
            if files[file] != "dsl.py" and line != "0":  # who called, not what was called
                near = f" near {files[file]}:{line}"
        elif not token.startswith("."):
            place(program, parse(program, token, scopes, near))
    for block in program.blocks:
        if block.end and block.end.name.startswith("bra"):
            name, scope = block.end.operands[0], block.end.operands[1]
            block.target = labels[name if name.startswith("$") else f"{name} {scope}"]
    return program


def scoped(name: str, scopes: tuple[int, ...], known: dict[str, int]) -> str:
    """A name's own form: names inside braces are told apart by the number of the scope."""
    if name.startswith("$"):
        return name
    for scope in reversed(scopes):
        if f"{name} {scope}" in known:
            return f"{name} {scope}"
    return name if known else f"{name} {scopes[-1]}"


def declare(program: Program, name: str, kind: str) -> None:
    program.names[name] = len(program.kinds)
    program.kinds.append(KIND[kind])


def declare_all(program: Program, token: str, scopes: tuple[int, ...]) -> None:
    _, kind, names = token.split(None, 2)
    for name in names.split(","):
        many = re.match(r"(%\w+)<(\d+)>", name.strip())
        if many:
            for i in range(int(many.group(2))):
                declare(program, f"{many.group(1)}{i}", kind[1:])
        else:
            declare(program, f"{name.strip()} {scopes[-1]}", kind[1:])


def parse(program: Program, token: str, scopes: tuple[int, ...], near: str) -> Statement:
    guard, text = None, token + near
    matched = re.match(r"@(!?)(%?\w+)\s+(.*)", token, re.S)
    if matched:
        guard = program.names[scoped(matched.group(2), scopes, program.names)], bool(matched[1])
        token = matched.group(3)
    name, _, rest = re.sub(r"\s+", " ", token).partition(" ")
    operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,]+", rest)]
    if name.startswith("bra") and not name.startswith("barrier"):
        return Statement(guard, name, (operands[0], str(scopes[-1])), text)
    named = [scoped(o, scopes, program.names) for o in operands if o]
    return Statement(guard, name, tuple(named), text)


def place(program: Program, s: Statement) -> None:
    """Appends to the last block, or begins another."""
    last = program.blocks[-1]
    waits = s.name.startswith(WAITS)
    collective = s.name.split(".")[0] in COLLECTIVE
    assert not (collective and s.guard), f"a collective of some lanes: {s.text}"
    if last.end or (last.body and (waits or (collective and not last.collective))):
        last = Block()
        program.blocks.append(last)
    last.collective |= collective
    if waits or s.name == "ret" or s.name in ("bra", "bra.uni"):
        last.end = s
    else:
        last.body.append(s)


# ---- translating ----


def translate(program: Program, s: Statement, masked: bool) -> list[str]:
    """Lines of Python; with a guard or in a masked block only the lanes concerned are changed."""
    mask = "m" if masked else "None"
    before = [f"w.line = {s.text!r}"] if s.name.startswith(("ld", "st", "cp", "mb", "red")) else []
    lines = []
    if s.guard:
        register, negated = s.guard
        lines.append(f"q = {'~' if negated else ''}R[{register}]{' & m' if masked else ''}")
        mask = "q"
    inside = before + effects(program, s, mask)
    if s.guard:
        return [*lines, "if q.any():", *(f"    {line}" for line in inside)]
    return inside


def effects(program: Program, s: Statement, mask: str) -> list[str]:
    """An instruction's lines: assignments to registers, calls of the warp."""
    parts, o = s.name.split("."), s.operands
    head, kind = parts[0], parts[-1]

    def put(name: str, value: str) -> str:
        index = program.names[name]
        if program.kinds[index] != "bool_":
            value = f"({value}).view('{program.kinds[index]}')"
        return (
            f"R[{index}] = {value if mask == 'None' else f'np.where({mask}, {value}, R[{index}])'}"
        )

    def registers(operand: str) -> list[str]:
        return [r.strip() for r in operand.strip("{}").split(",")]

    if s.name.startswith(("griddepcontrol", "fence", "createpolicy")):
        if s.name == "griddepcontrol.wait":
            return ["w.wait_for_earlier_grids()"]
        if s.name in ("fence.proxy.async", "fence.proxy.async.global"):
            return ["w.fence_async()"]
        return [put(o[0], program.read("0", "b64"))] if head == "createpolicy" else []
    if s.name.startswith("ld.param"):
        value = f"w.params[{int(o[1].rstrip(']').rpartition('_')[2])}]"
        if np.dtype(program.kinds[program.names[o[0]]]).itemsize > int(kind[1:]) // 8:
            number = np.dtype(arithmetic.TYPES[kind]).name  # is extended
            value = f"{value}.view('{number}').astype('{number[:-2]}64')"
        return [put(o[0], value)]
    if s.name.startswith(("ld.global", "ld.shared", "ld.relaxed.gpu.global")):
        names, size = registers(o[0]), int(kind[1:]) // 8
        space = "global" if "global" in parts else "shared"
        call = f"t = w.load_{space}({program.address(o[1])}, {len(names)}, {size}, {mask})"
        wide = ".astype('uint32')" if size == 1 else ""  # a byte is extended
        return [call, *(put(n, f"t[{i}]{wide}") for i, n in enumerate(names))]
    if s.name.startswith(("st.global", "st.shared", "st.relaxed.gpu.global")):
        space = "global" if "global" in parts else "shared"
        space = "cluster" if "cluster" in s.name else space
        values = ", ".join(program.read(v, "b" + kind[1:]) for v in registers(o[1]))
        return [f"w.store_{space}({program.address(o[0])}, [{values}], {mask})"]
    if s.name == "red.release.gpu.global.add.u32":
        return [f"w.red_add({program.address(o[0])}, {program.read(o[1], 'b32')}, {mask})"]
    if head == "red":
        assert s.name == "red.relaxed.cta.shared.or.b32", s.name
        return [f"w.red_or({program.address(o[0])}, {program.read(o[1], 'b32')}, {mask})"]
    if head == "mapa":
        return [put(o[0], f"map_to_rank({program.read(o[1], 'u32')}, {program.read(o[2], 'u32')})")]
    if head == "cp" or head == "mbarrier":
        return asynchronous(program, s, mask)
    if s.name.startswith("barrier.cluster.arrive"):
        return [f"w.arrive_at_cluster({'relaxed' not in s.name})"]
    if s.name == "bar.warp.sync":
        return []
    if head == "mma":
        a, b, c = ([program.read(r, "b32") for r in registers(v)] for v in o[1:])
        call = f"t = mma([{', '.join(a)}], [{', '.join(b)}], [{', '.join(c)}])"
        return [call, *(put(r, f"t[{i}]") for i, r in enumerate(registers(o[0])))]
    if head == "ldmatrix":
        call = f"t = w.load_matrices({program.address(o[1])}, {'.trans.' in s.name})"
        return [call, *(put(r, f"t[{i}]") for i, r in enumerate(registers(o[0])))]
    if head == "mov" and o[0].startswith("{"):
        names = registers(o[0])
        call = f"t = parts_of({program.read(o[1], kind)}, {len(names)})"
        return [call, *(put(n, f"t[{i}]") for i, n in enumerate(names) if n != "_")]
    if head == "mov" and o[1].startswith("{"):
        names = registers(o[1])
        part = f"b{int(kind[1:]) // len(names)}"
        values = ", ".join(program.read(n, part) for n in names)
        return [put(o[0], f"joined([{values}], '{np.dtype(arithmetic.TYPES[kind]).name}')")]
    return [put(o[0], value_of(program, s))]


def asynchronous(program: Program, s: Statement, mask: str) -> list[str]:
    o, at = s.operands, program.address
    if s.name.startswith("mbarrier.init"):
        return [f"w.init_mbarrier({at(o[0])}, {program.read(o[1], 'b32')}, {mask})"]
    if s.name == "mbarrier.arrive.expect_tx.shared.b64":
        due = program.read(o[2], "b32")
        return [f"w.arrive({at(o[1])}, {program.read('1', 'b32')}, {due}, {mask})"]
    if s.name == "mbarrier.arrive.shared.b64":
        count = program.read(o[2], "b32")
        return [f"w.arrive({at(o[1])}, {count}, {program.read('0', 'b32')}, {mask})"]
    if s.name.startswith("cp.async.bulk"):
        places = f"{at(o[0])}, {at(o[1])}, {program.read(o[2], 'b32')}, {at(o[3])}"
        return [f"w.copy_bulk({places}, {mask})"]
    if s.name.startswith("cp.async.cg"):
        return [f"w.copy_16({at(o[0])}, {at(o[1])}, {mask})"]
    if s.name == "cp.async.commit_group":
        return ["w.commit_group()"]
    if s.name == "cp.async.wait_group":
        return [f"w.wait_group({int(o[0])})"]
    raise NotImplementedError(s.text)


def value_of(program: Program, s: Statement) -> str:
    """The result of an instruction that only computes, as a Python expression."""
    parts, o = s.name.split("."), s.operands
    head, kind = parts[0], parts[-1]
    bits = f"u{kind[1:]}" if kind[1:].isdigit() else kind  # where the sign does not matter

    def read(i: int, as_kind: str) -> str:
        return program.read(o[i], as_kind)

    def two(as_kind: str) -> tuple[str, str]:
        return read(1, as_kind), read(2, as_kind)

    if s.name in arithmetic.APPROXIMATE:
        return f"{arithmetic.APPROXIMATE[s.name]}({read(1, kind)})"
    if s.name == "cvt.rn.bf16x2.f32":
        return "pack_bf16({}, {})".format(*two("f32"))
    if s.name == "mul.rn.bf16x2":
        return "multiply_bf16x2({}, {})".format(*two("b32"))
    if s.name == "fma.rn.f32":
        return f"fma({read(1, kind)}, {read(2, kind)}, {read(3, kind)})"
    if head in ("add", "sub") or (head == "mul" and (parts[1] == "lo" or kind == "f32")):
        a, b = two(kind if kind == "f32" else bits)
        return f"{a} {dict(add='+', sub='-', mul='*')[head]} {b}"
    if head == "mad" and parts[1] == "lo":
        return f"{read(1, bits)} * {read(2, bits)} + {read(3, bits)}"
    if head in ("mul", "mad"):
        half = int(kind[1:])
        wide = f"{kind[0]}{2 * half}"
        numpy_type = np.dtype(arithmetic.TYPES[wide]).name
        product = f"{read(1, kind)}.astype('{numpy_type}') * {read(2, kind)}"
        if parts[1] == "hi":
            return f"(({product}) >> {half}).astype('{np.dtype(arithmetic.TYPES[kind]).name}')"
        return product + (f" + {read(3, wide)}" if head == "mad" else "")
    if head == "rem":
        return "remainder({}, {})".format(*two(kind))
    if head == "div":
        return ("{} / {}" if kind == "f32" else "divide({}, {})").format(*two(kind))
    if head in ("min", "max"):
        names = {"min": "np.fmin", "max": "np.fmax"}
        found = f"{names[head]}({', '.join(two(kind))})"
        return f"np.maximum({found}, 0).astype('int32')" if "relu" in parts else found
    if head in BITWISE:
        return f" {BITWISE[head]} ".join(two(kind))
    if head == "not":
        return f"~{read(1, kind)}"
    if head == "neg":
        return f"-{read(1, kind)}"
    if head in ("shl", "shr"):
        amount = f"{read(2, 'u32')}.astype('{np.dtype(arithmetic.TYPES[kind]).name}')"
        return f"{read(1, kind)} {'<<' if head == 'shl' else '>>'} {amount}"
    if head == "setp":
        a, b = two(kind)
        if parts[1] == "nan":
            return f"np.isnan({a}) | np.isnan({b})"
        return f"{a} {COMPARE[parts[1]]} {b}"
    if head == "selp":
        return f"np.where({read(3, 'pred')}, {read(1, kind)}, {read(2, kind)})"
    if head == "mov":
        return "w.time()" if o[1] == "%globaltimer" else read(1, kind)
    if head == "cvt":
        return converted(program, o, parts[1], kind)
    if head in ("popc", "clz", "brev"):
        return f"{head}({read(1, 'b32')})"
    if head == "vote":
        return f"ballot({read(1, 'pred')})"
    if head == "redux":
        return f"np.full(32, {read(1, kind)}.max())"
    if head == "shfl":
        assert o[3:] == ("31", "-1"), s.text
        return f"shuffle_{parts[2]}({read(1, 'b32')}, {read(2, 'u32')})"
    raise NotImplementedError(s.text)


def converted(program: Program, o: tuple[str, ...], to: str, kind: str) -> str:
    """cvt between integers. Bytes are held in wider registers, extended."""

    def held(operand: str) -> str:
        """The integer type of a register that holds a byte."""
        return program.kinds[program.names[operand]].removeprefix("u")

    def name(byte: str) -> str:
        return {"s8": "int8", "u8": "uint8"}[byte]

    if kind in ("s8", "u8"):
        value = f"{program.read(o[1], 'b' + held(o[1])[3:])}.astype('{name(kind)}')"
    else:
        value = program.read(o[1], kind)
    if to in ("s8", "u8"):
        signed = held(o[0]) if to == "s8" else "u" + held(o[0])
        return f"{value}.astype('{name(to)}').astype('{signed}')"
    return f"{value}.astype('{np.dtype(arithmetic.TYPES[to]).name}')"
