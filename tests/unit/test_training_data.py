"""Text: documents, the held-out split, tokenizers, and windows of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eco_dist.training.data import Document, Split, find_documents, split_documents
from eco_dist.training.tokens import TokenFile, load_tokenizer, open_tokens, write_tokens


def documents(count: int) -> list[Document]:
    return [Document(name=f"folder/{i}.txt", content=f"document {i}\n") for i in range(count)]


@given(count=st.integers(2, 200), share=st.floats(0.01, 0.99))
def test_every_document_lies_on_exactly_one_side(count: int, share: float) -> None:
    split = split_documents(documents(count), share)
    train, heldout = ({document.name for document in side} for side in (split.train, split.heldout))
    assert train
    assert heldout
    assert not train & heldout
    assert train | heldout == {document.name for document in documents(count)}


@given(count=st.integers(20, 60), extra=st.integers(1, 60))
def test_a_document_does_not_change_sides_when_others_arrive(count: int, extra: int) -> None:
    few, many = (split_documents(documents(n), 0.5) for n in (count, count + extra))
    assert {document.name for document in few.heldout} <= {document.name for document in many.heldout}


def test_the_share_held_out_is_about_what_was_asked_for() -> None:
    assert len(split_documents(documents(2000), 0.1).heldout) == pytest.approx(200, abs=45)


def test_copies_of_a_document_cannot_leak() -> None:
    twins = [Document(name=f"{i}.txt", content=f"text {i % 10}") for i in range(100)]
    split = split_documents(twins, 0.3)
    texts = [document.text() for document in (*split.train, *split.heldout)]
    assert sorted(texts) == [f"text {i}" for i in range(10)]


def test_a_single_file_is_cut_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    split = split_documents([Document(name="one.txt", content=text)], 0.1)
    train, heldout = split.train[0].text(), split.heldout[0].text()
    assert train + heldout == text
    assert train.endswith("\n")
    assert 0.05 < len(heldout) / len(text) < 0.15


@pytest.mark.parametrize("content", [[], [Document(name="a", content="")], [Document(name="a", content="x")]])
def test_too_little_text_is_refused(content: list[Document]) -> None:
    with pytest.raises(ValueError, match="expected"):
        split_documents(content, 0.1)


def test_a_folder_gives_its_text_files_with_relative_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "sub/a.txt", "image.png"):
        (tmp_path / name).write_text(name)
    assert [document.name for document in find_documents(tmp_path, [".txt"])] == ["b.txt", "sub/a.txt"]
    assert find_documents(tmp_path / "b.txt", [".md"])[0].text() == "b.txt"
    with pytest.raises(ValueError, match=r"\.md"):
        find_documents(tmp_path, [".md"])
    with pytest.raises(FileNotFoundError, match=r"data\.path"):
        find_documents(tmp_path / "none", [".txt"])


def test_the_default_corpus_is_the_standard_library_without_tests() -> None:
    names = [document.name for document in find_documents(None, [".py"])]
    assert len(names) == len(set(names)) > 300
    assert "argparse.py" in names
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))


def corpus() -> Split:
    words = [f"the value number {i} is {i * i}\n" * 5 for i in range(30)]
    named = [Document(name=f"{i}.txt", content=text) for i, text in enumerate(words)]
    return Split(train=named[:25], heldout=named[25:])


def test_bytes_are_written_with_a_separator_a_document(tmp_path: Path) -> None:
    write_tokens(corpus(), tmp_path, tokenizer="bytes", vocabulary=256)
    tokens = open_tokens(tmp_path, "heldout", 8).tokens
    assert bytes(tokens.astype(np.uint8)) == b"".join(b"\0" + d.text().encode() for d in corpus().heldout)


def test_bpe_is_trained_on_the_training_split_and_cached(tmp_path: Path) -> None:
    split = Split(train=corpus().train, heldout=[Document(name="h", content="zebra quagga zebra quagga " * 50)])
    write_tokens(split, tmp_path, tokenizer="bpe", vocabulary=300)
    tokenizer = load_tokenizer("bpe", tmp_path)
    assert 257 <= tokenizer.vocabulary <= 300
    learned = (tmp_path / "tokenizer.json").read_text()
    assert "value" in learned
    assert "quagga" not in learned
    assert len(tokenizer.encode("the value")) < len("the value")
    assert open_tokens(tmp_path, "train", 8).tokens.max() < tokenizer.vocabulary
    stamp = (tmp_path / "train.tokens").stat().st_mtime_ns
    write_tokens(split, tmp_path, tokenizer="bpe", vocabulary=300)
    assert (tmp_path / "train.tokens").stat().st_mtime_ns == stamp
    write_tokens(split, tmp_path, tokenizer="bytes", vocabulary=300)
    assert (tmp_path / "train.tokens").stat().st_mtime_ns != stamp


def test_a_tokenizer_that_is_missing_or_malformed_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="byte"):
        load_tokenizer("byte", tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json"):
        load_tokenizer(str(tmp_path / "broken.json"), tmp_path)


@given(length=st.integers(9, 200), seq_len=st.integers(1, 8))
def test_windows_make_each_token_a_target_once(length: int, seq_len: int) -> None:
    file = TokenFile(tokens=np.arange(length, dtype=np.uint16), seq_len=seq_len)
    inputs, targets = file.batch(np.arange(file.windows))
    assert (targets == inputs + 1).all()
    assert targets.flatten().tolist() == list(range(1, file.windows * seq_len + 1))
    assert length - 1 - file.windows * seq_len < seq_len


def test_text_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    write_tokens(corpus(), tmp_path, tokenizer="bytes", vocabulary=256)
    with pytest.raises(ValueError, match=r"data\.seq_len=100000"):
        open_tokens(tmp_path, "train", 100_000)
