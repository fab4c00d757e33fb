"""The synthetic study: its tasks against plain loops, its models, and the whole of it in small."""

import dataclasses
import itertools
import json
import multiprocessing
import sys
import time
from collections import defaultdict

import pytest
import torch
from runs import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "synthetic"))

import reasoning
from one_layer import VARIANTS
from synthetic_tasks import IGNORED, composition, counting_accuracy, cpm3, positive_rate

TINY = dataclasses.replace(
    reasoning.SMALL["binary"],
    sizes=(2, 3),
    rows=(24, 8, 8),
    hidden_size=16,
    pseudo_heads=2,
    epochs=2,
    learning_rates=(1e-2, 1e-3),
    seeds=(0, 1),
)


def rows_of(examples):
    """Each row without its padding, as lists, which is at its end and of zeros."""
    for ids, first, second, labels in zip(examples.ids, examples.first, examples.second, examples.labels, strict=True):
        count = int((labels != IGNORED).sum())
        assert (labels[count:] == IGNORED).all()
        assert not any(states[count:].any() for states in (ids, first, second))
        yield [states[:count].tolist() for states in (ids, first, second, labels)]


@pytest.mark.parametrize("relations", [2, 3])
def test_relations_compose_as_in_plain_loops(relations):
    examples = composition(60, relations, (2, 5), 0.4, torch.Generator().manual_seed(0))
    seen = set()
    for ids, first, second, labels in rows_of(examples):
        size = int(len(ids) ** 0.5)
        seen.add(size)
        pairs = list(itertools.product(range(size), repeat=2))
        assert list(zip(first, second, strict=True)) == pairs
        related = dict(zip(pairs, ids, strict=True))

        def holds(relation, i, j, related=related):
            return related[i, j] >> relation & 1

        for (i, j), label in zip(pairs, labels, strict=True):
            path = any(
                all(holds(r, a, b) for r, (a, b) in enumerate(itertools.pairwise((i, *between, j))))
                for between in itertools.product(range(size), repeat=relations - 1)
            )
            assert label == path
    assert seen == {2, 3, 4, 5}


def test_matching_triples_are_counted_as_in_plain_loops():
    examples = cpm3(40, (3, 6), 4, 8, torch.Generator().manual_seed(0))
    lengths, order_matters = set(), False
    for numbers, first, second, labels in rows_of(examples):
        lengths.add(len(numbers))
        assert first == list(range(len(numbers))) and not any(second)
        for own, label in zip(numbers, labels, strict=True):
            pairs = list(itertools.product(numbers, repeat=2))
            count = sum((own + 2 * one + 3 * other) % 4 == 0 for one, other in pairs)
            order_matters |= any(
                ((own + 2 * one + 3 * other) % 4 == 0) != ((own + 2 * other + 3 * one) % 4 == 0)
                for one, other in pairs
            )
            assert label == min(count, 7)
    assert lengths == {3, 4, 5, 6} and order_matters


@pytest.mark.parametrize("relations", [2, 3])
def test_rates_are_those_of_all_relations(relations):
    """Two elements: all relations there are, each with its chance. What is counted: R(0, .), .(., 1), the middle."""
    density, rate, by_counts = 0.3, 0.0, defaultdict(lambda: [0.0, 0.0])
    for bits in itertools.product((0, 1), repeat=4 * relations):
        matrices = torch.tensor(bits).view(relations, 2, 2)
        reached = matrices[0]
        for matrix in matrices[1:]:
            reached = reached @ matrix
        chance, related = density ** sum(bits) * (1 - density) ** (len(bits) - sum(bits)), bool(reached[0, 1])
        rate += chance * related
        middle = int(matrices[1:-1].sum())
        by_counts[int(matrices[0, 0].sum()), int(matrices[-1, :, 1].sum()), middle][related] += chance
    assert counting_accuracy(2, relations, density) == pytest.approx(sum(map(max, by_counts.values())), abs=1e-12)
    assert positive_rate(2, relations, density) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("settings", [*reasoning.FULL.values(), *reasoning.SMALL.values()], ids=repr)
def test_labels_are_near_half_positive_as_computed(settings):
    if settings.task == "cpm3":
        data = reasoning.examples(dataclasses.replace(settings, rows=(300, 1, 1)), 0, "train")
        capped = (data.labels == settings.classes - 1).sum() / data.real.sum()
        assert capped < 0.05  # few counts are too high to be told
        return
    low, high = settings.sizes
    relations = reasoning.RELATIONS[settings.task]
    tokens = {size: size**2 for size in range(low, high + 1)}
    rate = sum(count * positive_rate(size, relations, settings.density) for size, count in tokens.items())
    rate /= sum(tokens.values())
    data = reasoning.examples(dataclasses.replace(settings, rows=(1000, 1, 1)), 0, "train")
    assert 0.45 < rate < 0.56
    assert abs(float((data.labels == 1).sum() / data.real.sum()) - rate) < 0.02


def test_splits_are_drawn_once_for_all_models_and_differ():
    drawn = {}
    for seed, split in itertools.product(range(3), reasoning.SPLITS):
        data, again = (reasoning.examples(TINY, seed, split) for _ in range(2))
        assert torch.equal(data.ids, again.ids) and torch.equal(data.labels, again.labels)
        drawn[seed, split] = tuple(data.ids[:8].flatten().tolist())
    assert len(set(drawn.values())) == 9


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_has_no_influence_and_all_real_tokens_have(variant):
    torch.manual_seed(0)
    model = reasoning.build(dataclasses.replace(TINY, hidden_size=32), variant).double()
    data = reasoning.examples(TINY, 0, "train")
    row = data[(data.real.sum(1) == 4).nonzero()[0]]  # two elements among rows of three
    with torch.no_grad():
        said = reasoning.logits(model, row)[row.real]
        garbage = dataclasses.replace(row, ids=row.ids.where(row.real, 3), first=row.first.where(row.real, 2))
        assert torch.equal(reasoning.logits(model, garbage)[row.real], said)
        short = model(row.ids[:, :4], row.first[:, :4], row.second[:, :4], row.real[:, :4])
        assert (short[0] - said).abs().max() < 1e-12
        for token in range(4):  # earlier ones see later ones as well
            ids = row.ids.clone()
            ids[0, token] = 3 - ids[0, token]
            assert ((reasoning.logits(model, dataclasses.replace(row, ids=ids))[row.real] - said) != 0).any(-1).all()


def test_models_are_of_one_size():
    for settings in (reasoning.FULL["binary"], reasoning.SMALL["binary"]):
        counts = {v: sum(p.numel() for p in reasoning.build(settings, v).parameters()) for v in VARIANTS}
        assert max(counts.values()) < 1.03 * min(counts.values())
        assert counts["IHA, exact"] - counts["MHA"] == 4 * settings.pseudo_heads * settings.heads**2
        assert counts["Talking-Heads"] - counts["MHA"] == 2 * settings.heads**2


def outcome(folder):
    """All results but the times."""
    results = json.loads((folder / "results.json").read_text())
    for row in results["rows"]:
        assert row.pop("cpu seconds") > 0
    return results


def all_runs(folder):
    for run in reasoning.runs_of(TINY):
        reasoning.do(folder, *run)


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_results(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    all_runs(whole)
    reasoning.report(whole, [TINY])

    process = multiprocessing.get_context("fork").Process(target=all_runs, args=(killed,))
    process.start()
    while len(list(killed.glob("runs/binary/*.json"))) < 3:
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    done = {file: file.stat().st_mtime_ns for file in killed.glob("runs/binary/*.json")}
    assert 3 <= len(done) < len(reasoning.runs_of(TINY))

    reasoning.study(killed, [TINY], 1)
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in done.items())
    assert outcome(killed) == outcome(whole)
    assert (killed / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (killed / "results.md").read_text().count("\n| binary") == len(VARIANTS)

    file = next(iter(done))
    with pytest.raises(ValueError, match=r"was run with epochs=2, here 3. Give another --output_dir"):
        reasoning.study(killed, [dataclasses.replace(TINY, epochs=3)], 1)
    assert file.exists()


def test_training_stops_early_and_takes_the_best_epoch(monkeypatch):
    accuracies = iter([0.5, 0.7, 0.6, 0.7, 0.1])
    states = []

    def accuracy(model, data):
        states.append(model.head.weight.detach().clone())
        return next(accuracies)

    monkeypatch.setattr(reasoning, "accuracy", accuracy)
    run = reasoning.train(dataclasses.replace(TINY, epochs=10, patience=2), "MHA", 1e-2, 0)
    assert run["validation"] == [0.5, 0.7, 0.6, 0.7] and run["test"] == 0.1
    assert torch.equal(states[4], states[1]) and not torch.equal(states[4], states[3])


def test_a_model_learns_what_chance_does_not_know():
    settings = dataclasses.replace(TINY, rows=(600, 100, 200), epochs=4)
    run = reasoning.train(settings, "IHA, exact", 1e-2, 0)
    assert run["test"] > run["chance"] + 0.1
