"""PTX text to functions, instructions and variables.

Covers what NVRTC emits and what inline assembly puts beside it: register ranges, nested scopes with their own registers
and labels, vectors, addresses, predicates, parameter structs, module variables with initialisers, device functions.
"""

from __future__ import annotations

import bisect
import struct

from jitmx.errors import SimulationError
from jitmx.sim.ptx import (
    SIZES,
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)
from jitmx.sim.tokens import kind, tokens


def number(text: str) -> Immediate:
    """An immediate from its spelling."""
    head = text[:2].lower()
    if head == "0f":
        return Immediate(int(text[2:], 16), "f32")
    if head == "0d":
        return Immediate(int(text[2:], 16), "f64")
    if "." in text:
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "f64")
    return Immediate(int(text.rstrip("Uu"), 0))


class _Scope:
    """Names that one pair of braces declares."""

    def __init__(self, parent: _Scope | None, suffix: str) -> None:
        self.parent, self.suffix = parent, suffix
        self.names: dict[str, str] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.met: dict[str, Operand] = {}  # what names meant here since the last declaration

    def find(self, name: str) -> str | None:
        """The unique name of what `name` means here, or None."""
        scope: _Scope | None = self
        stem, digits = _numbered(name)
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            if digits and stem in scope.ranges and int(digits) < scope.ranges[stem][0]:
                return name + scope.suffix
            scope = scope.parent
        return None

    def type_of(self, name: str) -> str | None:
        """The type of a register of a range, by its unsuffixed name."""
        scope: _Scope | None = self
        stem, digits = _numbered(name)
        while scope is not None and digits:
            if stem in scope.ranges:
                return scope.ranges[stem][1]
            scope = scope.parent
        return None


def _numbered(name: str) -> tuple[str, str]:
    """A name without the digits at its end, and these."""
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]


class _Parser:
    def __init__(self, source: str) -> None:
        self.texts, self.lines = tokens(source)
        self.texts.append("")
        self.lines.append(0)
        self.at = 0
        self.scopes = 0
        # Where braces and colons are, among which those of labels.
        self.marks = [at for at, text in enumerate(self.texts) if text in ("{", "}", ":")]
        self.opcodes: dict[str, tuple[str, ...]] = {}

    # Tokens
    @property
    def kind(self) -> str:
        return kind(self.texts[self.at])

    @property
    def line(self) -> int:
        return self.lines[self.at]

    def peek(self, ahead: int = 0) -> str:
        return self.texts[self.at + ahead] if self.at + ahead < len(self.texts) else ""

    def take(self, expected: str | None = None) -> str:
        text = self.texts[self.at]
        if expected is not None and text != expected:
            raise SimulationError(f"PTX line {self.line}: expected {expected!r}, found {text!r}")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.texts[self.at] != text:
            return False
        self.at += 1
        return True

    def skip_statement(self) -> None:
        while self.take() != ";":
            if not self.peek():
                return

    # Module
    def module(self) -> Module:
        out = Module("", {}, {})
        while self.peek():
            text = self.peek()
            if text == ".version" or text == ".address_size":
                self.take()
                self.take()
            elif text == ".target":
                self.take()
                out.target = self.take()
                while self.accept(","):
                    self.take()
            elif text in (".visible", ".weak", ".extern", ".common"):
                self.take()
            elif text in (".entry", ".func"):
                function = self.function()
                if function.body or function.name not in out.functions:
                    out.functions[function.name] = function
            elif text in (".global", ".const", ".shared"):
                for variable in self.variables():
                    out.variables[variable.name] = variable
            elif text in (".pragma", ".alias"):
                self.skip_statement()
            else:
                raise SimulationError(f"PTX line {self.line}: directive {text!r} is not known")
        return out

    def variables(self) -> list[Variable]:
        """A declaration in a state space, up to its semicolon."""
        space, align, vector, kind = self.take()[1:], 0, 1, ""
        while self.peek().startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = int(self.take(), 0)
            elif word in ("v2", "v4"):
                vector = int(word[1:])
            elif word in SIZES:
                kind = word
        out = []
        while True:
            name = self.take()
            count, symbol_size = vector, SIZES[kind]
            while self.accept("["):
                count *= 0 if self.peek() == "]" else int(self.take(), 0)
                self.take("]")
            image = None
            if self.accept("="):
                image = b"".join(self.initialiser(symbol_size)).ljust(count * symbol_size, b"\0")
            elif space in ("global", "const") and count:
                image = bytes(count * symbol_size)
            out.append(Variable(name, space, count * symbol_size, max(align, symbol_size), image))
            # In a parameter list, what follows the comma is another declaration.
            if self.peek(1) in (".param", ".reg") or not self.accept(","):
                break
        if self.peek() == ";":
            self.take()
        return out

    def initialiser(self, size: int) -> list[bytes]:
        if self.accept("{"):
            out: list[bytes] = []
            while not self.accept("}"):
                out += self.initialiser(size)
                self.accept(",")
            return out
        negative = self.accept("-")
        if self.kind not in ("number", "float"):
            raise SimulationError(f"PTX line {self.line}: initialiser {self.peek()!r} is not a number")
        value = number(self.take()).value
        return [((-value if negative else value) % (1 << 8 * size)).to_bytes(size, "little")]

    def parameters(self) -> list[Variable]:
        out: list[Variable] = []
        while not self.accept(")"):
            if self.peek() in (".param", ".reg"):
                out += self.variables()
            if not self.accept(","):
                self.take(")")
                break
        return out

    def function(self) -> Function:
        line = self.line
        entry = self.take() == ".entry"
        results = self.parameters() if self.accept("(") else []
        function = Function(self.take(), entry, line, results=results)
        if self.accept("("):
            function.parameters = self.parameters()
        while self.peek().startswith("."):
            name, values = self.take()[1:], []
            while self.kind == "number":
                values.append(int(self.take(), 0))
                self.accept(",")
            if name == "pragma":
                self.skip_statement()
            function.directives[name] = values
        if self.accept(";"):
            return function
        self.take("{")
        scope = _Scope(None, "")
        for item in (*function.parameters, *function.results):
            scope.names[item.name] = item.name
            if item.space == "reg":
                function.registers[item.name] = f"b{8 * item.size}"
        self.block(function, scope)
        return function

    # Statements
    def block(self, function: Function, scope: _Scope) -> None:
        """Statements up to the closing brace."""
        self.declare_labels(function, scope)
        while not self.accept("}"):
            text = self.peek()
            if not text:
                raise SimulationError(f"PTX: function {function.name} has no closing brace")
            if self.accept(";"):
                continue
            if self.accept("{"):
                self.scopes += 1
                self.block(function, _Scope(scope, f"~{self.scopes}"))
            elif self.peek(1) == ":" and self.kind == "name":
                label = scope.names[self.take()]
                function.labels[label] = len(function.body)
                self.take(":")
                if self.accept(".branchtargets"):
                    function.tables[label] = self.targets(scope)
                elif self.peek() in (".calltargets", ".callprototype"):
                    self.skip_statement()
            elif text == ".reg":
                self.registers(function, scope)
            elif text in (".local", ".shared", ".param", ".global", ".const"):
                scope.met.clear()
                for variable in self.variables():
                    unique = variable.name + scope.suffix
                    scope.names[variable.name] = unique
                    function.variables.append(
                        Variable(unique, variable.space, variable.size, variable.align, variable.image)
                    )
            elif text.startswith("."):
                self.skip_statement()
            else:
                function.body.append(self.instruction(function, scope))

    def targets(self, scope: _Scope) -> list[str]:
        """Labels up to the end of the statement."""
        listed = iter(self.take, ";")
        return [scope.find(text) or text for text in listed if text != ","]

    def declare_labels(self, function: Function, scope: _Scope) -> None:
        """Labels of this scope, which branches may name before they stand."""
        depth = 0
        for number in range(bisect.bisect_left(self.marks, self.at), len(self.marks)):
            at = self.marks[number]
            if self.texts[at] != ":":
                depth += 1 if self.texts[at] == "{" else -1
                if depth < 0:
                    break
            elif depth == 0 and at > self.at and kind(self.texts[at - 1]) == "name":
                scope.names[self.texts[at - 1]] = self.texts[at - 1] + scope.suffix

    def registers(self, function: Function, scope: _Scope) -> None:
        self.take(".reg")
        scope.met.clear()
        kind = self.take()[1:]
        if kind not in SIZES:
            raise SimulationError(f"PTX line {self.line}: registers of type .{kind} are not known")
        while True:
            name = self.take()
            if self.accept("<"):
                scope.ranges[name] = int(self.take(), 0), kind
                self.take(">")
            else:
                scope.names[name] = name + scope.suffix
                function.registers[name + scope.suffix] = kind
            if not self.accept(","):
                break
        self.take(";")

    def instruction(self, function: Function, scope: _Scope) -> Instruction:
        line = self.line
        predicate = None
        if self.accept("@"):
            negated = self.accept("!")
            found = self.name(self.take(), function, scope)
            if not isinstance(found, Register):
                raise SimulationError(f"PTX line {line}: the predicate {found} is no register")
            predicate = Register(found.name, negated)
        text = self.take()
        opcode = self.opcodes.get(text)
        if opcode is None:
            opcode = self.opcodes[text] = tuple(text.split("."))
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand(function, scope))
            if not self.accept(","):
                self.take(";")
                break
        return Instruction(opcode, tuple(operands), predicate, line)

    # Operands
    def operand(self, function: Function, scope: _Scope) -> Operand:
        text, line = self.texts[self.at], self.lines[self.at]
        what = kind(text)
        if what == "name":
            self.at += 1
            first = self.name(text, function, scope)
            following = self.texts[self.at]
            if following == "|":
                self.at += 1
                return Pair(first, self.operand(function, scope))
            if following in ("+", "-") and isinstance(first, Symbol):
                self.at += 1
                sign = (1 if following == "+" else -1) * (-1 if self.accept("-") else 1)
                return Symbol(first.name, sign * number(self.take()).value)
            return first
        if what in ("number", "float"):
            self.at += 1
            return number(text)
        if self.accept("["):
            base = self.operand(function, scope)
            coordinates: tuple[Operand, ...] = ()
            offset = 0
            if isinstance(base, Symbol):
                base, offset = Symbol(base.name), base.offset
            while self.peek() in ("+", "-"):
                sign = -1 if self.take() == "-" else 1
                if self.accept("-"):
                    sign = -sign
                offset += sign * number(self.take()).value
            if self.accept(","):
                inner = self.operand(function, scope)
                coordinates = inner.items if isinstance(inner, Vector) else (inner,)
            self.take("]")
            if not isinstance(base, Register | Symbol | Immediate):
                raise SimulationError(f"PTX line {line}: {base} cannot be an address")
            return Address(base, offset, coordinates)
        for opening, closing in (("{", "}"), ("(", ")")):
            if self.accept(opening):
                items: list[Operand] = []
                while not self.accept(closing):
                    items.append(self.operand(function, scope))
                    self.accept(",")
                return Vector(tuple(items))
        if self.accept("!"):
            found = self.name(self.take(), function, scope)
            if isinstance(found, Register):
                return Register(found.name, True)
            raise SimulationError(f"PTX line {line}: ! wants a predicate")
        if self.accept("-"):
            value = number(self.take())
            return Immediate(-value.value, value.kind)
        raise SimulationError(f"PTX line {line}: {text!r} is no operand")

    def name(self, text: str, function: Function, scope: _Scope) -> Operand:
        found = scope.met.get(text)
        if found is None:
            found = scope.met[text] = self._name(text, function, scope)
        return found

    def _name(self, text: str, function: Function, scope: _Scope) -> Operand:
        if text == "_":
            return Sink()
        unique = scope.find(text)
        if unique is not None:
            kind = function.registers.get(unique) or (scope.type_of(text) if unique not in function.labels else None)
            if kind is not None:
                function.registers[unique] = kind
                return Register(unique)
            return Symbol(unique)
        if text.startswith(("%", "WARP_SZ")):
            return Register(text)
        return Symbol(text)


def parse(source: str) -> Module:
    """The module that `source` holds.

    Raises:
        SimulationError: a line that is not understood; the message has its number.
    """
    return _Parser(source).module()
