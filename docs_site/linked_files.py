"""Hook of MkDocs: takes files of the repository that pages link to into the site, and rewrites the links. Fails a build
whose pages load anything from another server.

Pages in docs/ link to recorded results, .proto files and source, as paths that work in a checkout. Pages of Markdown or
HTML and images keep their form, other files become a page with their text. What they link to comes along in turn.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"

_FOREIGN = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_AS_THEY_ARE = frozenset({".svg", ".png", ".html"})


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds what pages link to outside of docs/, directly or through other such files."""
    waiting = list(DOCS.rglob("*.md"))
    while waiting:
        page = waiting.pop()
        for target in filter(None, (_target(page, link) for link in _LINK.findall(page.read_text()))):
            if files.get_file_from_path(_uri(target)) is None:
                files.append(_file(target, config))
                waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links between files of the repository links between pages of the site."""
    uri = page.file.src_uri
    source = DOCS / uri if page.file.abs_src_path is not None else REPOSITORY / uri

    def rewrite(found: re.Match[str]) -> str:
        link = found[0]
        target = _target(source, link)
        if target is None:
            return link  # MkDocs says what is wrong with it
        fragment = urlsplit(link).fragment
        return os.path.relpath(_uri(target), os.path.dirname(uri) or ".") + (f"#{fragment}" if fragment else "")

    return _LINK.sub(rewrite, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Raises PluginError if a browser would load something from elsewhere: the site is read offline."""
    if found := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another server: {found[0]}")
    return output


def _target(page: Path, link: str) -> Path | None:
    """The file of the repository that a link names; None: it names something else, or nothing."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    target = Path(os.path.normpath(page.parent / parts.path))
    return target if target.is_file() and target.is_relative_to(REPOSITORY) else None


def _uri(path: Path) -> str:
    """Returns the URI of a file of the repository in the site's sources."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = path.relative_to(REPOSITORY).as_posix()
    if uri == "README.md":
        return "index.md"  # the site's own front page
    return uri if path.suffix in (".md", *_AS_THEY_ARE) else f"{uri}.md"


def _file(path: Path, config: MkDocsConfig) -> File:
    content = path.read_bytes()
    if path.suffix not in (".md", *_AS_THEY_ARE):
        content = f"# {path.name}\n\n```{path.suffix.removeprefix('.')}\n{content.decode()}\n```\n".encode()
    return File.generated(config, _uri(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV)
