"""Key-value retrieval: records of a key and its value, some of them seen before, whose value is to be said again."""

import torch

SYMBOLS = 32  # of each place of a key, and of values
IGNORED = -100


VOCABULARY = 3 * SYMBOLS  # of the first place of a key, the second, and of values


def single_key(rows: int, records: int, keys: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Records `key key value` drawn again and again from `keys` of them. In a row one of the two places holds the same
    symbol in all records, so that the other one says which is meant.

    Returns:
        Token ids and labels, each [rows, 3 records]. The values of records seen before carry the loss, the rest is
        -100.
    """
    key = _distinct(rows, SYMBOLS, keys, generator)
    same = torch.randint(SYMBOLS, (rows, 1), generator=generator).expand(rows, keys)
    is_first = torch.rand(rows, 1, generator=generator) < 0.5
    value = torch.randint(SYMBOLS, (rows, keys), generator=generator)
    record = _records(torch.where(is_first, key, same), torch.where(is_first, same, key), value)
    drawn = torch.randint(keys, (rows, records), generator=generator)
    seen = torch.stack([(drawn[:, :i] == drawn[:, i : i + 1]).any(1) for i in range(records)], 1)
    return _with_labels(record.gather(1, drawn[..., None].expand(-1, -1, 3)), seen)


def multi_key(rows: int, records: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Records `key key value`, all of them once and then once more in another order. No pair of keys is there twice, but
    either key alone is: with 85 records in 2.7 of them, so that only both together say which is meant.

    Returns:
        Token ids and labels, each [rows, 2 * 3 records]; the values of the second half carry the loss.
    """
    pair = _distinct(rows, SYMBOLS**2, records, generator)
    value = torch.randint(SYMBOLS, (rows, records), generator=generator)
    record = _records(pair // SYMBOLS, pair % SYMBOLS, value)
    again = _distinct(rows, records, records, generator)
    ids = torch.cat([record, record.gather(1, again[..., None].expand_as(record))], 1)
    seen = (torch.arange(2 * records) >= records).expand(rows, -1)
    return _with_labels(ids, seen)


def _records(first: torch.Tensor, second: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Three of [rows, records] -> [rows, records, 3], tokens of their own for each place."""
    return torch.stack([first, SYMBOLS + second, 2 * SYMBOLS + value], -1)


def _distinct(rows: int, upper: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, count] of 0 .. upper - 1, none twice in a row."""
    return torch.rand(rows, upper, generator=generator).argsort(1)[:, :count]


def _with_labels(records: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, records, tokens] -> ids and labels [rows, records * tokens]."""
    labels = torch.full_like(records, IGNORED)
    labels[..., -1] = torch.where(seen, records[..., -1], IGNORED)
    return records.flatten(1), labels.flatten(1)
