"""The one name for nodes of sqlglot's trees, which its versions name differently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlglot import exp

if TYPE_CHECKING:
    from sqlglot.expressions import Expr as Expression
else:
    Expression = getattr(exp, "Expr", exp.Expression)

__all__ = ["Expression"]
