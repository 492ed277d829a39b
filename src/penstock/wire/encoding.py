"""Writes the Python source of an encoder for one (message class, version).

Theory: the mirror of decoding. The generated function appends byte strings to a list; runs of
fixed-width values, together with the length byte of what follows them, are packed by one call.
A length above 126 or a tagged field that differs from its default takes the longer branch.

Invariants of the generated code: it does not change the message; a field that the version does
not have is skipped; a value that cannot be written raises, and nothing is returned. Touches only
field descriptions.
"""

from __future__ import annotations

from penstock.wire.message import Field, Message, Struct
from penstock.wire.source import FIXED, SourceWriter, fixed_array_table, layout


class EncoderSource(SourceWriter):
    """Collects the lines and the namespace of one encoder."""

    def __init__(self, cls: type[Message], version: int) -> None:
        super().__init__(version, version >= cls.FLEXIBLE_FROM)
        where = f"{cls.NAME} v{version}"
        self.emit("def encode_parts(m):")
        self.indent += 1
        self.emit("parts = []")
        self.emit("w = parts.append")
        self.emit("try:")
        self.indent += 1
        self.struct(cls, "m")
        self.flush()
        self.emit("return parts")
        self.indent -= 1
        self.emit("except (struct_error, TypeError, AttributeError, ValueError) as e:")
        self.emit(f"    raise WireError(f'{where}: cannot be written: {{e}}') from e")

    def flush(self) -> None:
        if self.pending:
            self.emit(self.packed(self.pending))
            self.pending.clear()

    def packed(self, values: list[tuple[str, str]]) -> str:
        """The statement that writes these values; a format without a value is a zero byte."""
        formats = "".join(fmt for fmt, _ in values)
        if formats.strip("x") == "":
            return f"w({bytes(len(formats))!r})"
        name = self.bind("p", layout(formats).pack)
        return f"w({name}({', '.join(expr for _, expr in values if expr)}))"

    def struct(self, cls: type[Struct], var: str) -> None:
        tagged: list[Field] = []
        for field in cls.SPEC:
            if not field.exists_in(self.version):
                continue
            if self.flexible and field.tagged_in(self.version):
                tagged.append(field)
            else:
                self.value(field, f"{var}.{field.name}")
        if self.flexible:
            self.tags(var, sorted(tagged, key=lambda f: f.tag))

    def value(self, field: Field, expr: str) -> None:
        nullable = field.nullable_in(self.version)
        if field.array:
            self.array(field, expr, nullable)
        elif not isinstance(field.type, str):
            self.inner_struct(field.type, expr, nullable)
        elif field.type == "uuid":
            self.pending.append(("16s", f"{expr}.int.to_bytes(16)"))
        elif field.type in FIXED:
            self.pending.append((FIXED[field.type], expr))
        else:
            self.chunk(field.type, expr, nullable)

    def inner_struct(self, cls: type[Struct], expr: str, nullable: bool) -> None:
        var = self.fresh("m")
        self.emit(f"{var} = {expr}")
        if not nullable:
            self.struct(cls, var)
            return
        self.emit(f"if {var} is None: {self.packed([*self.pending, ('b', '-1')])}")
        self.emit("else:")
        self.indent += 1
        self.pending.append(("b", "1"))
        self.struct(cls, var)
        self.flush()
        self.indent -= 1

    def length(self, var: str, legacy_format: str, long: str = "encode_uvarint") -> None:
        """Write everything pending and the length; in flexible versions `var` is one more."""
        if not self.flexible:
            self.pending.append((legacy_format, var))
            self.flush()
            return
        short = self.packed([*self.pending, ("B", var)]) if self.pending else f"w(one_byte[{var}])"
        self.emit(f"if {var} < 128: {short}")
        before = f"{self.packed(self.pending)}; " if self.pending else ""
        self.emit(f"else: {before}w({long}({var}))")
        self.pending.clear()

    def null_branch(self, var: str, legacy_format: str) -> None:
        """Write null, and begin the part for what is not; the caller ends it."""
        null = ("x", "") if self.flexible else (legacy_format, "-1")
        self.emit(f"if {var} is None: {self.packed([*self.pending, null])}")
        self.emit("else:")
        self.indent += 1

    def chunk(self, kind: str, expr: str, nullable: bool) -> None:
        data, size = self.fresh("s"), self.fresh("c")
        legacy_format = "h" if kind == "string" else "i"
        if nullable:
            self.emit(f"{data} = {expr}")
            self.null_branch(data, legacy_format)
            if kind == "string":
                self.emit(f"{data} = {data}.encode()")
        else:
            self.emit(f"{data} = {expr}{'.encode()' if kind == 'string' else ''}")
        self.emit(f"{size} = len({data}){' + 1' if self.flexible else ''}")
        long = "encode_string_length" if kind == "string" else "encode_uvarint"
        self.length(size, legacy_format, long)
        self.emit(f"w({data})")
        if nullable:
            self.indent -= 1

    def array(self, field: Field, expr: str, nullable: bool) -> None:
        items, count = self.fresh("x"), self.fresh("c")
        self.emit(f"{items} = {expr}")
        if nullable:
            self.null_branch(items, "i")
        self.emit(f"{count} = len({items}){' + 1' if self.flexible else ''}")
        if isinstance(field.type, str) and field.type in FIXED and field.type != "uuid":
            self.fixed_array(FIXED[field.type], items, count)
        else:
            self.length(count, "i")
            self.loop(field, items)
        if nullable:
            self.indent -= 1

    def loop(self, field: Field, items: str) -> None:
        item = self.fresh("m")
        self.emit(f"for {item} in {items}:")
        self.indent += 1
        if isinstance(field.type, str):
            self.value(Field(field.name, field.type), item)
        else:
            self.struct(field.type, item)
        self.flush()
        self.indent -= 1

    def fixed_array(self, code: str, items: str, count: str) -> None:
        """Write what is pending, the count and, if they are few, the numbers with one call."""
        extra = 1 if self.flexible else 0
        prefix = "".join(fmt for fmt, _ in self.pending) + ("B" if self.flexible else "i")
        layouts, _ = fixed_array_table(code, prefix)
        writers = self.bind("T", (None,) * extra + tuple(s.pack for s in layouts))
        values = ", ".join([*(expr for _, expr in self.pending if expr), count])
        if not self.pending:
            empty = b"\1" if self.flexible else bytes(4)
            self.emit(f"if not {items}: w({empty!r})")
        branch = "if" if self.pending else "elif"
        small = f"{count} < {len(layouts) + extra}"
        self.emit(f"{branch} {small}: w({writers}[{count}]({values}, *{items}))")
        self.emit("else:")
        self.indent += 1
        self.length(count, "i")
        self.emit(f"w(pack_many('>%d{code}' % len({items}), *{items}))")
        self.indent -= 1

    def tags(self, var: str, tagged: list[Field]) -> None:
        if not tagged:
            self.pending.append(("x", ""))
            return
        conditions = [self.differs(field, f"{var}.{field.name}") for field in tagged]
        self.emit(f"if not ({' or '.join(conditions)}): {self.packed([*self.pending, ('x', '')])}")
        self.emit("else:")
        self.indent += 1
        self.flush()
        self.emit(f"w(encode_uvarint({' + '.join(f'bool({c})' for c in conditions)}))")
        for field, condition in zip(tagged, conditions, strict=True):
            outer, inner, body = self.fresh("w"), self.fresh("l"), self.fresh("b")
            self.emit(f"if {condition}:")
            self.indent += 1
            self.emit(f"{outer} = w; {inner} = []; w = {inner}.append")
            self.value(field, f"{var}.{field.name}")
            self.flush()
            self.emit(f"{body} = b''.join({inner}); w = {outer}")
            self.emit(f"w(encode_uvarint({field.tag}) + encode_uvarint(len({body}))); w({body})")
            self.indent -= 1
        self.indent -= 1

    def differs(self, field: Field, expr: str) -> str:
        """The condition under which a tagged field is written."""
        if field.default is None:
            return f"{expr} is not None"
        if field.array:
            # Where null is allowed it differs from the empty default.
            return f"{expr} != []" if field.nullable_in(self.version) else f"{expr}"
        if not isinstance(field.type, str):
            inner = (self.differs(f, f"{expr}.{f.name}") for f in field.type.SPEC)
            return f"({' or '.join(inner)})"
        if field.type == "uuid":
            return f"{expr}.int"
        return f"{expr} != {field.default!r}"
