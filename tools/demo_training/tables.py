"""Reading small tables out of text."""


def listed(text: str) -> list[str]:
    """Split at commas: `"a, b"` gives `["a", "b"]`."""
    return [item.strip() for item in text.split(",")]


def rows(table: str) -> list[list[str]]:
    """Split lines into cells: `a = b = c` gives `["a", "b", "c"]`."""
    return [[cell.strip() for cell in line.split("=")] for line in table.strip().splitlines()]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of an indented block of text, each on one line."""
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
