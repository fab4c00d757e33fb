"""What the mixing of a checkpoint has become: numbers, and a folder of figures with one page that holds them all."""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from transformers.utils import logging

from configuration_iha import IHAConfig
from inspection_iha import (
    LayerStatistics,
    Patterns,
    attention_patterns,
    by_layer,
    draw_graph,
    draw_mixing,
    draw_patterns,
    layer_statistics,
    write_page,
)

from .checkpoint import CheckpointError, build_config
from .exporter import read_iha
from .mixing import mixing_shapes
from .source import open_source
from .structure import load_tensors

GRAPH = (
    "Left to right: the heads, the pseudo-queries mixed of them (head.pseudo-head), the heads that the collapse makes "
    "of what these attend to. Red lines are weights above 0, blue ones below; the stronger, the larger the weight."
)
ATTENTION = (
    "Rows are the tokens that attend, columns those attended to. The plain head is the same head without mixing; "
    "'query i, key j' is its pseudo-query i at pseudo-keys j, and the weights of a query's row sum to 1 over all j. "
    "The colour grows with the root of the weight."
)


def inspect(
    source: str | os.PathLike,
    output_dir: str | os.PathLike | None = None,
    *,
    prompt: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    revision: str | None = None,
) -> list[LayerStatistics]:
    """
    Reads the mixing tensors of an IHA checkpoint; the model itself is loaded for a prompt only.

    Args:
        source: a folder, or a Hub id.
        output_dir: a folder to make: statistics.json, figures as PNG, and index.html, which holds all. None for the
            numbers alone.
        prompt: a text whose attention patterns are drawn.
        layer: of the graph and the patterns; by default that whose mixing is farthest from plain heads.
        head: of the patterns; by default the first.
        revision: branch, tag or commit of a Hub id.

    Returns:
        The statistics of each layer with P > 1.

    Raises:
        CheckpointError: the source is not a whole IHA checkpoint, no layer has pseudo-heads, or the folder is taken.
        ValueError: no such layer or head, or the prompt is too long.
    """
    if prompt is not None and output_dir is None:
        raise ValueError("prompt: its patterns are figures, so an output_dir is needed.")
    if layer is not None and output_dir is None:
        raise ValueError(f"layer={layer}: it is drawn, so an output_dir is needed.")
    if head is not None and prompt is None:
        raise ValueError(f"head={head}: its patterns are those of a prompt, which is needed.")
    if output_dir is not None and os.path.lexists(output_dir):
        raise CheckpointError(f"{output_dir}: exists already; name another folder.")
    with open_source(source, revision) as folder:
        iha = read_iha(folder)
        mixing = by_layer(load_tensors(iha, mixing_shapes(build_config(iha, IHAConfig)).keys()))
        if not mixing:
            raise CheckpointError(f"{source}: num_pseudo_heads is 1 in every layer, so nothing is mixed.")
        rows = [layer_statistics(index, tensors) for index, tensors in mixing.items()]
        if layer is None:
            layer = max(rows, key=lambda row: sum(row.distance.values())).layer
        if layer not in mixing:
            raise ValueError(f"layer={layer} must be one with pseudo-heads: {', '.join(map(str, mixing))}.")
        heads = iha.config["num_attention_heads"]
        if head is not None and not 0 <= head < heads:
            raise ValueError(f"head={head} must be at least 0 and below {heads}.")
        if output_dir is not None:
            patterns, tokens = _read(folder, prompt, layer, head or 0) if prompt is not None else (None, [])
            _write(Path(output_dir), Path(source).name, rows, mixing, layer, patterns, tokens, prompt)
    return rows


def _read(folder: Path, prompt: str, layer: int, head: int) -> tuple[Patterns, list[str]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return attention_patterns(model, torch.tensor(ids), layer, head), [tokenizer.decode([token]) for token in ids]


def _write(folder: Path, name: str, rows, mixing, layer: int, patterns: Patterns | None, tokens, prompt) -> None:
    folder = Path(os.path.abspath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        graph = _draw(draw_graph(layer, mixing[layer]), new / "graph.png")
        figures = {f"Pseudo-heads of layer {layer}": (graph, GRAPH)}
        if patterns is not None:
            title = f"Attention of layer {layer}, head {patterns.head}"
            figures[title] = (_draw(draw_patterns(patterns, tokens), new / "attention.png"), ATTENTION)
        drawn = {
            index: _draw(draw_mixing(index, tensors), new / f"mixing-{index:03}.png")
            for index, tensors in logging.tqdm(mixing.items(), desc="Drawing layers", disable=None)
        }
        write_page(new / "index.html", f"Inside {name}", rows, figures, drawn, prompt)
        (new / "statistics.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
        os.rename(new, folder)


def _draw(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=110)
    return file
