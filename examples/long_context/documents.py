"""Documents as rows of one exact length, for continued pre-training."""

from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

IGNORED = -100


def load(name: str) -> Dataset:
    """
    The documents of a data set on the Hub, or of a local folder of .parquet, .jsonl or .txt files; a .txt file is one.

    Raises:
        ValueError: a folder holds no such file, or there is no column `text`.
    """
    suffixes = {suffix for path in Path(name).rglob("*") for suffix in path.suffixes}
    if Path(name).is_dir() and not suffixes & {".parquet", ".jsonl", ".json", ".txt"}:
        raise ValueError(f"{name} holds no .parquet, .jsonl or .txt file.")
    is_text = ".txt" in suffixes
    dataset = load_dataset(name, split="train", **({"sample_by": "document"} if is_text else {}))
    if "text" not in dataset.column_names:
        raise ValueError(f"{name} has the columns {dataset.column_names}: 'text' must be among them.")
    return dataset


def tokenize(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, processes: int | None = None) -> Dataset:
    """
    `input_ids` of every document, ended by the end-of-text token.

    Raises:
        ValueError: a document is empty; the message names its row. Or the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("eos_token=None must be a token: it ends every document.")

    def one(row, number):
        if not (row["text"] or "").strip():
            raise ValueError(f"row {number}: text={row['text']!r} is empty.")
        ids = tokenizer(row["text"], verbose=False).input_ids
        return {"input_ids": ids if ids[-1] == end else [*ids, end]}

    return dataset.map(
        one, with_indices=True, remove_columns=dataset.column_names, num_proc=processes, desc="Tokenizing"
    )


def rows_of(tokenized: Dataset, length: int, packed: bool) -> tuple[Dataset, int]:
    """
    Args:
        tokenized: `input_ids` per document.
        length: tokens in a row, exactly.
        packed: True fills every row with whatever documents come next, and cuts the one at its end, whose rest begins
            the next row. False takes the rows from within one document each, as a ring needs, which knows no
            boundaries.

    Returns:
        `input_ids`, `labels` (-100 where a document begins: nothing before it foretells it) and `seq_lengths` (the
        tokens of each document in the row); and how many tokens filled no row.

    Raises:
        ValueError: there is not one row.
    """
    lengths = list(map(len, tokenized["input_ids"]))
    if not (sum(lengths) // length if packed else max(lengths) // length):
        found = "all documents together have not" if packed else "no document has"
        raise ValueError(f"max_length={length}: {found} as many tokens. Give longer documents, or more of them.")
    rows = Dataset.from_generator(
        _packed if packed else _from_one,
        gen_kwargs={"tokenized": tokenized, "length": length},
    )
    return rows, sum(lengths) - len(rows) * length


def _packed(tokenized: Dataset, length: int) -> Iterator[dict]:
    row, labels, lengths = [], [], []
    for document in tokenized["input_ids"]:
        while document:
            piece, document = document[: length - len(row)], document[length - len(row) :]
            row += piece
            labels += [IGNORED, *piece[1:]]
            lengths.append(len(piece))
            if len(row) == length:
                yield {"input_ids": row, "labels": labels, "seq_lengths": lengths}
                row, labels, lengths = [], [], []


def _from_one(tokenized: Dataset, length: int) -> Iterator[dict]:
    for document in tokenized["input_ids"]:
        for start in range(0, len(document) - length + 1, length):
            ids = document[start : start + length]
            yield {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "seq_lengths": [length]}


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """
    A batch [rows, length] of `input_ids`, `labels` and `position_ids`, which start over with each document. There is
    no mask: that is how the model knows documents apart.
    """
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    positions = [torch.cat([torch.arange(length) for length in row["seq_lengths"]]) for row in rows]
    return {**batch, "position_ids": torch.stack(positions)}
