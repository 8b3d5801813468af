"""Tables of results, for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        header: The columns' names.
        rows: The cells.
        words: How many columns, from the left, hold words; the others hold numbers, which stand on the right.
        title: What the table shows.
        grouped: Whether rows that share their first cell belong together; on the terminal it then stands there once.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str | None = None
    grouped: bool = False

    def markdown(self) -> str:
        rule = ["---"] * self.words + ["---:"] * (len(self.header) - self.words)
        # A bar, as in |y|, would end a cell.
        lines = [[cell.replace("|", r"\|") for cell in line] for line in (self.header, rule, *self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return text if self.title is None else f"**{self.title}**\n\n{text}\n"

    def rich(self, title: str | None = None) -> RichTable:
        """For the terminal, under a title of its own if one is given."""
        # Names may hold brackets, which rich would read as markup.
        shown = title or self.title
        table = RichTable(title=None if shown is None else Text(shown))
        for position, column in enumerate(self.header):
            # Labels may be long paths: they fold, numbers do not.
            table.add_column(Text(column), justify="left" if position < self.words else "right", overflow="fold")
        previous: str | None = None
        for first, *others in self.rows:
            if self.grouped and previous not in (None, first):
                table.add_section()
            cells = ["" if self.grouped and first == previous else first, *others]
            table.add_row(*map(Text, cells))
            previous = first
        return table
