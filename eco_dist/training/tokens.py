"""Tokens: from documents to two files of token ids in the run directory, read through memory maps.

Rank 0 trains the tokenizer and writes the files; the other ranks only map them, so a machine holds the corpus once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eco_dist.training.data import Document, Split

__all__ = ["BytesTokenizer", "TokenFile", "Tokenizer", "load_tokenizer", "open_tokens", "train_bpe", "write_tokens"]

SEPARATOR = "<|document|>"
TOKEN_DTYPE = np.uint16
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Text to token ids below ``vocabulary``; the id ``separator`` starts each document."""

    vocabulary: int
    separator: int

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """The token ids of ``text``, without a separator."""
        ...


class BytesTokenizer:
    """A token is a byte of the UTF-8 text; the separator is byte 0, which text does not contain."""

    vocabulary = 256
    separator = 0

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """The UTF-8 bytes of ``text``."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(TOKEN_DTYPE)


class _FileTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.vocabulary: int = backend.get_vocab_size()
        known = [backend.token_to_id(token) for token in (SEPARATOR, "</s>", "<eos>", "<|endoftext|>")]
        self.separator: int = next((token for token in known if token is not None), 0)

    def encode(self, text: str) -> npt.NDArray[np.uint16]:
        """The token ids of ``text``."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=TOKEN_DTYPE)


def train_bpe(documents: Sequence[Document], vocabulary: int, file: Path) -> None:
    """Train a byte-level BPE tokenizer on ``documents`` (the training split only) and save it as ``file``.

    Raises:
        ValueError: the ``tokenizers`` library is missing.
    """
    tokenizers = _library()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[SEPARATOR],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((document.text() for document in documents), trainer=trainer)
    backend.save(str(file))


def load_tokenizer(name: str, directory: Path) -> Tokenizer:
    """The tokenizer of a run: ``bytes``, ``bpe`` (the trained one in ``directory``), or the file ``name``.

    Raises:
        FileNotFoundError: ``name`` is a path without a file.
        ValueError: the file is no tokenizer, or its vocabulary does not fit two bytes a token.
    """
    if name == "bytes":
        return BytesTokenizer()
    file = directory / TOKENIZER_FILE if name == "bpe" else Path(name)
    if not file.is_file():
        raise FileNotFoundError(
            f"expected data.tokenizer to be bytes, bpe or a tokenizer.json, got {name!r}; check the name or path"
        )
    try:
        tokenizer = _FileTokenizer(_library().Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"expected a tokenizer file of the tokenizers library at {file}, got: {error}") from error
    if tokenizer.vocabulary > np.iinfo(TOKEN_DTYPE).max + 1:
        raise ValueError(f"expected a vocabulary of at most 65,536, got {tokenizer.vocabulary}; use a smaller one")
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ValueError(
            "expected the package tokenizers, found none; pip install eco-dist[bpe] or set data.tokenizer=bytes"
        ) from error
    return tokenizers


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A memory-mapped run of token ids, read as windows of ``seq_len + 1`` tokens.

    Window i holds tokens i * seq_len .. (i + 1) * seq_len inclusive: inputs and, one further, targets. Neighbours share
    one token, so that each token but the first is a target exactly once.
    """

    tokens: npt.NDArray[np.uint16]
    seq_len: int

    @property
    def windows(self) -> int:
        """Number of whole windows."""
        return max(0, (len(self.tokens) - 1) // self.seq_len)

    def batch(self, windows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets ``(len(windows), seq_len)`` int64 of the windows with these numbers."""
        starts = windows * self.seq_len
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        block = torch.from_numpy(rows)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def write_tokens(split: Split, directory: Path, *, tokenizer: str, vocabulary: int) -> None:
    """Tokenize both sides of a split into ``directory``: ``train.tokens``, ``heldout.tokens``, ``tokens.json``.

    Files already there are kept if ``tokens.json`` shows the same documents and the same tokenizer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stamp = _stamp(split, tokenizer, vocabulary)
    record = directory / "tokens.json"
    if record.is_file() and json.loads(record.read_text()).get("stamp") == stamp:
        return
    record.unlink(missing_ok=True)
    if tokenizer == "bpe":
        train_bpe(split.train, vocabulary, directory / TOKENIZER_FILE)
    encoder = load_tokenizer(tokenizer, directory)
    counts = {
        side: _write(documents, encoder, directory / f"{side}.tokens")
        for side, documents in (("train", split.train), ("heldout", split.heldout))
    }
    files = {"train_documents": len(split.train), "heldout_documents": len(split.heldout)}
    record.write_text(
        json.dumps({"stamp": stamp, "vocabulary": encoder.vocabulary, "tokens": counts, **files}, indent=2)
    )


def open_tokens(directory: Path, side: str, seq_len: int) -> TokenFile:
    """Map ``train`` or ``heldout`` of a directory `write_tokens` has filled.

    Raises:
        ValueError: the text is shorter than one window.
    """
    file = directory / f"{side}.tokens"
    count = file.stat().st_size // np.dtype(TOKEN_DTYPE).itemsize
    if count <= seq_len:
        raise ValueError(
            f"expected more than data.seq_len={seq_len} tokens of {side} text, got {count}; "
            "add text or lower data.seq_len"
        )
    return TokenFile(tokens=np.memmap(file, dtype=TOKEN_DTYPE, mode="r"), seq_len=seq_len)


def _write(documents: Sequence[Document], encoder: Tokenizer, file: Path) -> int:
    total = 0
    with file.open("wb") as out:
        for piece in _pieces(documents, encoder):
            out.write(piece.tobytes())
            total += len(piece)
    return total


def _pieces(documents: Sequence[Document], encoder: Tokenizer) -> Iterator[npt.NDArray[np.uint16]]:
    separator = np.asarray([encoder.separator], dtype=TOKEN_DTYPE)
    for document in documents:
        yield separator
        yield encoder.encode(document.text())


def _stamp(split: Split, tokenizer: str, vocabulary: int) -> str:
    digest = hashlib.sha256(json.dumps([tokenizer, vocabulary]).encode())
    if Path(tokenizer).is_file():
        digest.update(Path(tokenizer).read_bytes())
    for side, documents in (("train", split.train), ("heldout", split.heldout)):
        for document in documents:
            digest.update(f"{side} {document.name} ".encode())
            digest.update(hashlib.sha256(document.text().encode("utf-8", errors="replace")).digest())
    return digest.hexdigest()
