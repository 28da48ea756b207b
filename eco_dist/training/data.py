"""Text: which documents there are, and which of them are held out.

Note: the default corpus
    Python's own standard library: its sources (without tests and installed packages) and the prose of
    ``pydoc_data.topics``, the language reference behind ``help()``. About 12 MB that is on every machine with Python.

Note: the held-out split
    Whole documents, chosen by a hash of their relative path, so that no document is seen on both sides, the choice does
    not depend on the machine or on the other files, and documents of equal content count once. A single file is split
    at a line near its end instead.
"""

from __future__ import annotations

import hashlib
import importlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Document", "Split", "find_documents", "split_documents"]

STDLIB_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
TOPICS = Path("pydoc_data/topics.py")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: its relative name, and its text or the file that holds it."""

    name: str
    file: Path | None = None
    content: str | None = field(default=None, repr=False)

    def text(self) -> str:
        """The text, UTF-8; bytes that are no UTF-8 become the replacement character."""
        if self.content is not None:
            return self.content
        assert self.file is not None
        return self.file.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Documents to train on and documents held out for validation."""

    train: Sequence[Document]
    heldout: Sequence[Document]


def find_documents(path: Path | None, suffixes: Sequence[str]) -> list[Document]:
    """All documents of a corpus, sorted by name.

    Args:
        path: a text file, a folder (read recursively), or None for Python's standard library.
        suffixes: file name endings that count as text in a folder, such as ``(".txt",)``.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        ValueError: a folder holds no file with one of the suffixes.
    """
    if path is None:
        return _standard_library()
    if path.is_file():
        return [Document(name=path.name, file=path)]
    if not path.is_dir():
        raise FileNotFoundError(f"expected a text file or a folder at data.path={path}, found nothing; check the path")
    found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(tuple(suffixes)))
    if not found:
        raise ValueError(
            f"expected text files ending in {', '.join(suffixes)} below {path}, found none; set data.suffixes"
        )
    return [Document(name=p.relative_to(path).as_posix(), file=p) for p in found]


def split_documents(documents: Sequence[Document], share: float) -> Split:
    """Split into train and held-out documents with about ``share`` of them held out, at least one on each side.

    A document is held out if sha256(name) / 2^256 < share. Copies of a document already seen are dropped.

    Raises:
        ValueError: there is no document, or a single one too short to split.
    """
    unique = list(_without_copies(documents))
    if not unique:
        raise ValueError("expected at least one document, got none; name a file or folder of text with data.path")
    if len(unique) == 1:
        return _split_one(unique[0], share)
    position = {document.name: _position(document.name) for document in unique}
    ordered = sorted(unique, key=lambda document: position[document.name])
    count = sum(position[document.name] < share for document in ordered)
    count = min(max(count, 1), len(ordered) - 1)
    chosen = {document.name for document in ordered[:count]}
    return Split(
        train=[document for document in unique if document.name not in chosen],
        heldout=[document for document in unique if document.name in chosen],
    )


def _position(name: str) -> float:
    """A point in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _without_copies(documents: Sequence[Document]) -> Iterator[Document]:
    seen: set[bytes] = set()
    for document in documents:
        digest = hashlib.sha256(document.text().encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield document


def _split_one(document: Document, share: float) -> Split:
    """Cut one text into a first and a last part, at the line end nearest after the share, if there is one."""
    text = document.text()
    cut = int(len(text) * (1.0 - share))
    line_end = text.find("\n", cut)
    cut = line_end + 1 if 0 <= line_end < len(text) - 1 else cut
    if not 0 < cut < len(text):
        raise ValueError(
            f"expected a text of two characters or more in {document.name}, got {len(text)}; name a longer one"
        )
    return Split(
        train=[Document(name=f"{document.name}#train", content=text[:cut])],
        heldout=[Document(name=f"{document.name}#heldout", content=text[cut:])],
    )


def _standard_library() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = [Document(name=p.relative_to(root).as_posix(), file=p) for p in sorted(_python_files(root))]
    return documents + _topics()


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink() and entry.name not in STDLIB_EXCLUDED:
            yield from _python_files(entry)
        elif entry.suffix == ".py" and entry.is_file() and not entry.as_posix().endswith(TOPICS.as_posix()):
            # the topics file holds prose as escaped string literals; `_topics` gives it as prose
            yield entry


def _topics() -> list[Document]:
    """The language reference behind ``help()``, one document a topic; none where the distribution left it out."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return []
    return [Document(name=f"{TOPICS.as_posix()}#{name}", content=text) for name, text in sorted(topics.items())]
