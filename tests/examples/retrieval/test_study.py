"""The retrieval study: its task, and the whole of it in small."""

import json
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "retrieval"
sys.path.insert(0, str(EXAMPLE))

import study  # noqa: E402  (what the path above makes importable)
from task import IGNORED, SYMBOLS, multi_key, single_key  # noqa: E402


def records(ids, labels):
    return ids.unflatten(1, (-1, 3)), labels.unflatten(1, (-1, 3))


def test_single_keys_are_told_by_one_place_and_asked_once_seen():
    ids, labels = records(*single_key(16, 24, 8, torch.Generator().manual_seed(0)))
    assert ((ids // SYMBOLS) == torch.arange(3)).all()
    for row, asked in zip(ids, labels, strict=True):
        same = [len(set(row[:, place].tolist())) == 1 for place in (0, 1)]
        assert same.count(True) == 1
        values = {}
        for record, label in zip(row.tolist(), asked.tolist(), strict=True):
            key = tuple(record[:2])
            assert label == [IGNORED, IGNORED, record[2] if key in values else IGNORED]
            assert values.setdefault(key, record[2]) == record[2]
        assert len(values) <= 8


def test_multi_keys_are_told_by_both_places_only():
    ids, labels = records(*multi_key(16, 85, torch.Generator().manual_seed(0)))
    for row, asked in zip(ids, labels, strict=True):
        first, second = row[:85].tolist(), row[85:].tolist()
        assert sorted(first) == sorted(second) and first != second
        assert len({tuple(record[:2]) for record in first}) == 85
        for place in (0, 1):
            assert len({record[place] for record in first}) <= SYMBOLS < 85
        assert (asked[:85] == IGNORED).all() and (asked[85:, :2] == IGNORED).all()
        assert (asked[85:, 2] == row[85:, 2]).all()


def test_the_study_runs_to_its_table_and_figure(tmp_path, monkeypatch):
    small = {"BEFORE": 2, "STEPS": 6, "EVALUATE": 2, "RECORDS": 6, "ROWS": 2, "CURRICULUM": (6,), "SEEDS": (0,)}
    for name, value in small.items():
        monkeypatch.setattr(study, name, value)
    study.one_seed(tmp_path / "0", 0)
    study.report(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["curves"].keys() == study.VARIANTS.keys()
    start = {name: runs[0]["loss"][0] for name, runs in results["curves"].items()}
    assert all(loss == pytest.approx(start["Llama"], rel=1e-5) for loss in start.values())  # one function
    assert results["curves"]["Llama"][0]["step"][-1] == study.steps_for_equal_flops() > study.STEPS
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "results.md").read_text().count("\n| ") == 2 + len(study.VARIANTS)
