"""Translates PTX instructions that touch only registers of their thread into Python.

A register holds its bits as an int, floats included; a predicate holds a bool.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ptx.text import Instruction, Kernel

SPECIAL = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x")
FORMATS = {32: ("<I", "<f"), 64: ("<Q", "<d")}


def mask(bits: int) -> int:
    return (1 << bits) - 1


def signed(value: int, bits: int) -> int:
    value &= mask(bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def number(value: int, bits: int) -> float:
    """Returns the float with these bits."""
    whole, real = FORMATS[bits]
    made: float = struct.unpack(real, struct.pack(whole, value))[0]
    return made


def bits_of(value: float, bits: int) -> int:
    """Rounds to nearest even.

    A sum or product of two floats is rounded twice, to double first. A double has enough bits for
    the same result as a single rounding.
    """
    if bits == 32:
        value = ctypes.c_float(value).value
    whole, real = FORMATS[bits]
    made: int = struct.unpack(whole, struct.pack(real, value))[0]
    return made


def unordered(left: float, right: float) -> bool:
    return math.isnan(left) or math.isnan(right)


def peek(memory: bytes, at: int, count: int, negative: bool) -> int:
    if at + count > len(memory):
        raise IndexError(f"reads byte {at + count} of {len(memory)}")
    return int.from_bytes(memory[at : at + count], "little", signed=negative)


def poke(memory: bytearray, at: int, count: int, value: int) -> None:
    if at + count > len(memory):
        raise IndexError(f"writes byte {at + count} of {len(memory)}")
    memory[at : at + count] = value.to_bytes(count, "little")


NAMES: dict[str, Any] = {
    "peek": peek,
    "poke": poke,
    "signed": signed,
    "number": number,
    "bits_of": bits_of,
    "unordered": unordered,
}
INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Translator:
    """Python source of a kernel's instructions; `r` is the thread's dict of registers."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def value(self, operand: str, bits: int = 64) -> str:
        """Returns an expression for the bits of an operand."""
        if operand in SPECIAL or operand.startswith("%"):
            return f"r[{operand!r}]"
        if operand[:2] in ("0f", "0d"):
            return str(int(operand[2:], 16))
        address = self._kernel.address(operand)
        return str(int(operand, 0) & mask(bits) if address is None else address)

    def address(self, operand: str) -> str:
        """Returns an expression for `[register+offset]` or `[name+offset]`."""
        base, _, offset = operand.strip("[]").partition("+")
        return f"(({self.value(base)} + {int(offset or 0)}) & {mask(64)})"

    def statement(self, instruction: Instruction) -> str:
        """Returns the statement of an instruction."""
        handler = HANDLERS.get(instruction.family)
        if handler is None:
            raise instruction.error()
        try:
            made = handler(self, instruction)
        except (IndexError, KeyError, ValueError) as error:
            raise instruction.error() from error
        if instruction.guard:
            wanted = "not " if instruction.negated else ""
            made = f"if {wanted}r[{instruction.guard!r}]: {made}"
        return made

    def result(self, register: str, expression: str, bits: int) -> str:
        cut = min(bits, self._kernel.width(register))
        return f"r[{register!r}] = ({expression}) & {mask(cut)}"


def _type(instruction: Instruction) -> tuple[str, int]:
    """Returns kind (b, u, s, f) and bits of an instruction's type."""
    name = instruction.opcode[-1]
    return ("p", 1) if name == "pred" else (name[0], int(name[1:]))


def _infix(self: Translator, instruction: Instruction) -> str:
    family, kind, bits = instruction.family, *_type(instruction)
    target, *operands = instruction.operands
    left, right = (self.value(each, bits) for each in operands)
    sign = INFIX[family]
    if kind == "p":
        return f"r[{target!r}] = {left} {sign} {right}"
    if kind == "f":
        if instruction.opcode[1] != "rn":
            raise instruction.error()
        exact = f"number({left}, {bits}) {sign} number({right}, {bits})"
        return f"r[{target!r}] = bits_of({exact}, {bits})"
    if family == "mul" and instruction.opcode[1] == "wide":
        if kind == "s":
            left, right = f"signed({left}, {bits})", f"signed({right}, {bits})"
        return self.result(target, f"{left} * {right}", 2 * bits)
    if family == "mul" and instruction.opcode[1] != "lo":
        raise instruction.error()
    return self.result(target, f"{left} {sign} {right}", bits)


def _not(self: Translator, instruction: Instruction) -> str:
    kind, bits = _type(instruction)
    target, operand = instruction.operands
    if kind == "p":
        return f"r[{target!r}] = not {self.value(operand)}"
    return self.result(target, f"~{self.value(operand, bits)}", bits)


def _shift(self: Translator, instruction: Instruction) -> str:
    kind, bits = _type(instruction)
    target, value, by = instruction.operands
    left, distance = self.value(value, bits), f"min({self.value(by, 32)}, {bits})"
    if instruction.family == "shl":
        return self.result(target, f"{left} << {distance}", bits)
    if kind == "s":
        left = f"signed({left}, {bits})"
    return self.result(target, f"{left} >> {distance}", bits)


def _extreme(self: Translator, instruction: Instruction) -> str:
    kind, bits = _type(instruction)
    if kind not in "us":
        raise instruction.error()
    target, *operands = instruction.operands
    values = [self.value(each, bits) for each in operands]
    if kind == "s":
        values = [f"signed({each}, {bits})" for each in values]
    return self.result(target, f"{instruction.family}({', '.join(values)})", bits)


def _select(self: Translator, instruction: Instruction) -> str:
    _, bits = _type(instruction)
    target, yes, no, predicate = instruction.operands
    chosen = f"{self.value(yes, bits)} if {self.value(predicate)} else {self.value(no, bits)}"
    return self.result(target, chosen, bits)


def _compare(self: Translator, instruction: Instruction) -> str:
    _, comparison, name = instruction.opcode
    kind, bits = name[0], int(name[1:])
    target, *operands = instruction.operands
    left, right = (f"{self.value(each, bits)} & {mask(bits)}" for each in operands)
    if kind == "f":
        left, right = f"number({left}, {bits})", f"number({right}, {bits})"
        if comparison == "nan":
            return f"r[{target!r}] = unordered({left}, {right})"
        if comparison == "ne":  # false for NaN, unlike Python's
            return f"r[{target!r}] = not unordered({left}, {right}) and {left} != {right}"
    if kind == "s":
        left, right = f"signed({left}, {bits})", f"signed({right}, {bits})"
    return f"r[{target!r}] = ({left}) {COMPARED[comparison]} ({right})"


def _move(self: Translator, instruction: Instruction) -> str:
    _, bits = _type(instruction)
    target, source = instruction.operands
    if source.startswith("{"):  # packs registers, the lowest bits first
        parts = names(source)
        each = bits // len(parts)
        packed = (f"{self.value(part, each)} << {i * each}" for i, part in enumerate(parts))
        return self.result(target, " | ".join(f"({part})" for part in packed), bits)
    if target.startswith("{"):
        parts = names(target)
        each = bits // len(parts)
        value = self.value(source, bits)
        return "; ".join(
            self.result(part, f"{value} >> {i * each}", each) for i, part in enumerate(parts)
        )
    return self.result(target, self.value(source, bits), bits)


def _convert(self: Translator, instruction: Instruction) -> str:
    *modes, to, of = instruction.opcode[1:]
    target, source = instruction.operands
    value = f"{self.value(source)} & {mask(int(of[1:]))}"
    if of[0] == "s":
        value = f"signed({value}, {of[1:]})"
    if of[0] in "us" and to[0] in "us" and not modes:
        return self.result(target, value, int(to[1:]))
    if of[0] in "us" and to[0] == "f" and modes == ["rn"]:
        return f"r[{target!r}] = bits_of({value}, {to[1:]})"
    raise instruction.error()


def _to_global(self: Translator, instruction: Instruction) -> str:
    # The generic address of global memory is the address itself.
    if instruction.opcode[1:3] != ("to", "global"):
        raise instruction.error()
    target, source = instruction.operands
    return self.result(target, self.value(source), 64)


def _insert(self: Translator, instruction: Instruction) -> str:
    _, bits = _type(instruction)
    target, inserted, into, at, count = instruction.operands
    field = mask(int(count)) << int(at)
    rest = f"({self.value(into, bits)} & {mask(bits) & ~field})"
    return self.result(target, f"{rest} | ({self.value(inserted)} << {at}) & {field}", bits)


def names(operand: str) -> list[str]:
    """Returns the registers of `{a, b}`, or the only one."""
    return [each.strip() for each in operand.strip("{}").split(",")]


def _private(self: Translator, instruction: Instruction) -> str:
    """Loads and stores of parameters and local memory, invisible to other threads."""
    space, *counted, name = instruction.opcode[1:]
    count = int(counted[0][1:]) if counted else 1
    bits = int(name[1:])
    first, second = instruction.operands
    reads = instruction.family == "ld"
    registers = names(first if reads else second)
    if len(registers) != count or len(counted) > 1:
        raise instruction.error()
    step = bits // 8
    at = self.address(second if reads else first)
    made = []
    for i, register in enumerate(registers):
        place = f"{space}, {at} + {i * step}, {step}"
        if reads:
            value = f"peek({place}, {name[0] == 's'})"
            made.append(self.result(register, value, self._kernel.width(register)))
        else:
            made.append(f"poke({place}, {self.value(register, bits)} & {mask(bits)})")
    return "; ".join(made)


Handler = Callable[[Translator, Instruction], str]
HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(INFIX, _infix),
    "not": _not,
    "shl": _shift,
    "shr": _shift,
    "min": _extreme,
    "max": _extreme,
    "selp": _select,
    "setp": _compare,
    "mov": _move,
    "cvt": _convert,
    "cvta": _to_global,
    "bfi": _insert,
    "ld": _private,
    "st": _private,
}

Segment = Callable[[dict[str, Any], bytes, bytearray], None]


def segment(kernel: Kernel, instructions: Sequence[Instruction]) -> Segment:
    """Returns a function for consecutive instructions.

    Arguments of the function: registers, parameters, and local memory of a thread.
    """
    translator = Translator(kernel)
    body = [translator.statement(each) for each in instructions] or ["pass"]
    source = "def made(r, param, local):\n" + "\n".join(f"    {line}" for line in body)
    scope: dict[str, Any] = dict(NAMES)
    exec(compile(source, f"{kernel.name}:{instructions[0].number}", "exec"), scope)
    made: Segment = scope["made"]
    return made
