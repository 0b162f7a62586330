"""Checks that docstrings begin with a verb or a noun phrase that can stand alone.

python -m docs_site.docstrings DIRECTORY...
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_DEPENDENT = re.compile(r"(As|For|Of|That|Those|Until|What|When|Where|Whose)\b")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def dependent_docstrings(path: Path) -> Iterator[str]:
    """Yields a line for each docstring of a file that depends on what stands before it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _Documented) and _DEPENDENT.match(text := ast.get_docstring(node) or ""):
            yield f"{path}:{getattr(node, 'lineno', 1)}: a docstring begins with {text.split(maxsplit=1)[0]!r}"


def main(directories: list[str]) -> int:
    """Prints the lines of all files in the directories. Returns 1 if there are any."""
    files = (path for directory in directories for path in sorted(Path(directory).rglob("*.py")))
    found = [line for path in files for line in dependent_docstrings(path)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
