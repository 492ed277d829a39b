"""Writes the Python source of a decoder for one (message class, version).

Theory: the whole message becomes one function without inner calls. Consecutive fixed-width fields,
the length byte of what follows them and the count of tagged fields are read by one precompiled
`struct` call straight into the object's slots. A variable length is one byte in nearly every
case, so only a first byte above 127 leaves the straight path.

Invariants of the generated code: `n` is the length of the buffer and nothing is read past it;
`left` is what remains of the number of array elements that the message may have, at most one per
byte, so memory is bounded by the size of the input; a length is compared with `n` before it is
used. `struct.error` and `IndexError` can only mean truncation. Touches only field descriptions.
"""

from __future__ import annotations

from penstock.wire.message import Field, Message, Struct
from penstock.wire.source import FIXED, SourceWriter, fixed_array_table, unpack_from


class DecoderSource(SourceWriter):
    """Collects the lines and the namespace of one decoder."""

    def __init__(self, cls: type[Message], version: int, limit: int) -> None:
        super().__init__(version, version >= cls.FLEXIBLE_FROM)
        self.where = f"{cls.NAME} v{version}"
        # A message without records is copied once, and then slices of bytes are cheap; with
        # records the buffer stays a view so that they are never copied.
        self.keeps_view = _has_records(cls)
        self.emit("def decode(buf, pos):")
        self.indent += 1
        if not self.keeps_view:
            self.emit("if type(buf) is not bytes: buf = bytes(buf)")
        self.emit("n = len(buf)")
        self.emit(f"left = min(n - pos, {limit})")
        self.emit("try:")
        self.indent += 1
        root = self.struct(cls)
        self.flush()
        self.indent -= 1
        self.emit("except (struct_error, IndexError):")
        self.emit(f"    raise WireError(f'{self.where}: truncated, at byte {{pos}}') from None")
        self.emit("except UnicodeDecodeError:")
        self.emit(f"    raise WireError(f'{self.where}: not UTF-8, at byte {{pos}}') from None")
        self.emit(f"return {root}, pos")

    def flush(self) -> None:
        """Read all pending fixed-width values with one call."""
        if not self.pending:
            return
        formats = "".join(fmt for fmt, _ in self.pending)
        targets = [target for _, target in self.pending]
        if formats == "B":
            self.emit(f"{targets[0]} = buf[pos]; pos += 1")
        else:
            name = self.bind("u", unpack_from(formats))
            self.emit(f"{', '.join(targets)}, = {name}(buf, pos)")
            self.emit(f"pos += {self.size_of(formats)}")
        self.pending.clear()
        self.lines.extend(self.after)
        self.after.clear()

    def bad(self, what: str) -> str:
        return f"raise WireError({f'{self.where}: {what}'!r})"

    def struct(self, cls: type[Struct]) -> str:
        """Read one struct; the result is the variable that holds it."""
        var = self.fresh("m")
        self.emit(f"{var} = new({self.bind('C', cls)})")
        tagged: list[Field] = []
        for field in cls.SPEC:
            if not field.exists_in(self.version):
                self.set_default(field, f"{var}.{field.name}")
            elif self.flexible and field.tagged_in(self.version):
                tagged.append(field)
            else:
                self.value(field, f"{var}.{field.name}")
        if self.flexible:
            self.tags(var, tagged)
        return var

    def set_default(self, field: Field, target: str) -> None:
        if field.default == () and not field.array:
            assert not isinstance(field.type, str)
            var = self.fresh("d")
            self.emit(f"{var} = new({self.bind('C', field.type)})")
            for inner in field.type.SPEC:
                self.set_default(inner, f"{var}.{inner.name}")
            self.emit(f"{target} = {var}")
        elif field.default == ():
            self.emit(f"{target} = []")
        elif field.type == "uuid" and field.default is not None:
            self.emit(f"{target} = zero_uuid")
        else:
            self.emit(f"{target} = {field.default!r}")

    def value(self, field: Field, target: str) -> None:
        nullable = field.nullable_in(self.version)
        if field.array:
            self.array(field, target, nullable)
        elif not isinstance(field.type, str):
            self.inner_struct(field.type, target, nullable)
        elif field.type in FIXED:
            self.fixed(field.type, target)
        else:
            self.chunk(field.type, field.name, target, nullable)

    def fixed(self, kind: str, target: str) -> None:
        if kind == "uuid":
            raw = self.fresh("r")
            self.pending.append(("16s", raw))
            self.after.append("    " * self.indent + f"{target} = uuid_of({raw})")
        else:
            self.pending.append((FIXED[kind], target))

    def inner_struct(self, cls: type[Struct], target: str, nullable: bool) -> None:
        if not nullable:
            self.emit_after_pending(f"{target} = {self.struct(cls)}")
            return
        mark = self.fresh("k")
        self.pending.append(("b", mark))
        self.flush()
        self.emit(f"if {mark} < 0: {target} = None")
        self.emit("else:")
        self.indent += 1
        var = self.struct(cls)
        self.flush()
        self.emit(f"{target} = {var}")
        self.indent -= 1

    def emit_after_pending(self, line: str) -> None:
        if self.pending:
            self.after.append("    " * self.indent + line)
        else:
            self.emit(line)

    def length(self, legacy_format: str) -> str:
        """Read a length or a count as it is on the wire: in flexible versions one more."""
        var = self.fresh("c")
        self.pending.append(("B" if self.flexible else legacy_format, var))
        self.flush()
        return var

    def null_branch(self, var: str, target: str) -> None:
        """Begin the part for what is not null; the caller ends it."""
        self.emit(f"if {var} == {0 if self.flexible else -1}: {target} = None")
        self.emit("else:")
        self.indent += 1

    def chunk(self, kind: str, name: str, target: str, nullable: bool) -> None:
        """Read a string, bytes or records."""
        var = self.length("h" if kind == "string" else "i")
        end = self.fresh("e")
        read = {
            "string": f"str(buf[pos:{end}], 'utf-8')"
            if self.keeps_view
            else f"buf[pos:{end}].decode()",
            "bytes": f"bytes(buf[pos:{end}])" if self.keeps_view else f"buf[pos:{end}]",
            "records": f"buf[pos:{end}]",
        }[kind]
        if nullable:
            self.null_branch(var, target)
        if self.flexible:
            long = "long_string_length" if kind == "string" else "long_uvarint"
            self.emit(f"if {var} > 127: {var}, pos = {long}(buf, pos, {var})")
        self.emit(f"{end} = pos + {var}{' - 1' if self.flexible else ''}")
        self.emit(f"if not pos <= {end} <= n: {self.bad(f'{name}: length out of bounds')}")
        self.emit(f"{target} = {read}")
        self.emit(f"pos = {end}")
        if nullable:
            self.indent -= 1

    def array(self, field: Field, target: str, nullable: bool) -> None:
        var = self.length("i")
        if nullable:
            self.null_branch(var, target)
        if isinstance(field.type, str) and field.type in FIXED and field.type != "uuid":
            self.fixed_array(field.name, FIXED[field.type], var, target)
        else:
            self.loop(field, var, target)
        if nullable:
            self.indent -= 1

    def checked_count(self, var: str, name: str) -> None:
        """Turn what is on the wire into a count that the message may have."""
        if self.flexible:
            self.emit(f"if {var} > 127: {var}, pos = long_uvarint(buf, pos, {var})")
            self.emit(f"{var} -= 1")
        self.emit(f"left -= {var}")
        self.emit(f"if {var} < 0 or left < 0: {self.bad(f'{name}: count out of bounds')}")

    def fixed_array(self, name: str, code: str, var: str, target: str) -> None:
        layouts, size = fixed_array_table(code)
        # A short array belongs to a struct that has been counted, so only a long one is.
        extra = 1 if self.flexible else 0
        readers = self.bind("T", (None,) * extra + tuple(s.unpack_from for s in layouts))
        self.emit(f"if {var} == {extra}: {target} = []")
        self.emit(f"elif {extra} < {var} < {len(layouts) + extra}:")
        self.emit(f"    {target} = list({readers}[{var}](buf, pos))")
        self.emit(
            f"    pos += ({var} - {extra}) * {size}" if extra else f"    pos += {var} * {size}"
        )
        self.emit("else:")
        self.indent += 1
        self.checked_count(var, name)
        self.emit(f"{target} = list(unpack_many('>%d{code}' % {var}, buf, pos))")
        self.emit(f"pos += {var} * {size}")
        self.indent -= 1

    def loop(self, field: Field, count: str, target: str) -> None:
        items = self.fresh("x")
        self.emit(f"{target} = {items} = []")
        self.emit(f"if {count} != {1 if self.flexible else 0}:")
        self.indent += 1
        self.checked_count(count, field.name)
        self.emit(f"for _ in range({count}):")
        self.indent += 1
        if isinstance(field.type, str):
            item = self.fresh("v")
            self.value(Field(field.name, field.type), item)
        else:
            item = self.struct(field.type)
        self.flush()
        self.emit(f"{items}.append({item})")
        self.indent -= 2

    def tags(self, var: str, tagged: list[Field]) -> None:
        count = self.fresh("t")
        self.pending.append(("B", count))
        self.flush()
        for field in tagged:
            self.set_default(field, f"{var}.{field.name}")
        if not tagged:
            self.emit(f"if {count}: pos = skip_tagged_fields(buf, pos, {count})")
            return
        tag, end = self.fresh("g"), self.fresh("e")
        self.emit(f"if {count}:")
        self.indent += 1
        self.emit(f"if {count} > 127: {count}, pos = long_uvarint(buf, pos, {count})")
        self.emit(f"for _ in range({count}):")
        self.indent += 1
        for name in (tag, end):
            self.emit(f"{name} = buf[pos]; pos += 1")
            self.emit(f"if {name} > 127: {name}, pos = long_uvarint(buf, pos, {name})")
        self.emit(f"{end} += pos")
        self.emit(f"if {end} > n: {self.bad('tagged field runs past the end')}")
        for index, field in enumerate(tagged):
            self.emit(f"{'elif' if index else 'if'} {tag} == {field.tag}:")
            self.indent += 1
            self.value(field, f"{var}.{field.name}")
            self.flush()
            self.emit(f"if pos != {end}: {self.bad(f'{field.name}: wrong size of tagged field')}")
            self.indent -= 1
        self.emit(f"else: pos = {end}")
        self.indent -= 2


def _has_records(cls: type[Struct]) -> bool:
    return any(
        f.type == "records" if isinstance(f.type, str) else _has_records(f.type) for f in cls.SPEC
    )
