"""What a call of a tool looks like in a model's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exo.models.markup.tools import Tool, ToolCall

Parse = Callable[[str, Sequence[Tool]], list[ToolCall]]


@dataclass(frozen=True)
class CallStyle:
    """What a call looks like between a format's markers, for grammars. The text is `lead`, then
    calls with `between` between them, then `trail`; a call is `before`, its name, `middle`, its
    arguments, `after`. Without `between` each call has markers of its own.

    Arguments are one JSON object, or written out one by one: `argument` before each value, with its
    name for {}, `argument_end` after it, too; texts raw if `raw_texts`, else as JSON, with
    `text_argument` before them where it is another.
    """

    before: str
    middle: str
    after: str = ""
    lead: str = ""
    trail: str = ""
    between: str | None = None
    argument: str | None = None
    text_argument: str | None = None
    argument_end: str = ""
    argument_between: str = ""
    raw_texts: tuple[str, str] | None = None

    @property
    def streams(self) -> bool:
        """Arguments are JSON that can be passed on as it comes."""
        return self.argument is None


@dataclass(frozen=True)
class CallFormat:
    """`opens` and `closes` are the markers around calls; without `closes` they go on to the end of
    the answer. `parse` reads what is between, `style` is what a grammar writes there."""

    name: str
    opens: str
    closes: str
    parse: Parse
    style: CallStyle
