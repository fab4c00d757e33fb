"""One page of HTML that holds the table and the figures in itself."""

import base64
import html
from pathlib import Path

from .statistics import LayerStatistics

STYLE = """
:root { color-scheme: light; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
img { max-width: 100%; height: auto; display: block; margin: 0.5rem 0; }
@media (max-width: 45rem) { img { max-width: none; } }  /* smaller, nobody could read a label: they scroll sideways */
summary { cursor: pointer; padding: 0.4rem 0; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: 0.5rem; }
"""
COLUMNS = (
    *("layer", "P"),
    *("Δ q", "Δ k", "Δ v", "Δ collapse"),
    *("# q", "# k", "# v", "reads, %"),
)
LEGEND = (
    "Δ: distance of queries (q), keys (k) and values (v) from plain copies of the heads, relative to their size; the "
    "collapse's is from reading the last pseudo-head alone. #: effective number of different pseudo-heads, 1 to P. "
    "Reads: how much the collapse reads of each pseudo-head. A model at a distance may still compute what a Llama "
    "model does, as after a conversion: iha export tells."
)


def cells(row: LayerStatistics) -> list[str]:
    """A row of the table, under `COLUMNS`."""
    return [
        str(row.layer),
        str(row.num_pseudo_heads),
        *(f"{row.distance[kind]:.3f}" for kind in ("q_mix", "k_mix", "v_mix", "collapse")),
        *(f"{row.distinct[kind]:.2f}" for kind in ("q_mix", "k_mix", "v_mix")),
        " ".join(f"{100 * share:.0f}" for share in row.collapse_mass),
    ]


def write_page(
    file: Path,
    title: str,
    rows: list[LayerStatistics],
    figures: dict[str, tuple[Path, str]],
    mixing: dict[int, Path],
    prompt: str | None = None,
) -> None:
    """
    Writes the page; it asks for nothing else when it is opened.

    Args:
        file: of HTML.
        title: its heading.
        rows: of the table.
        figures: a PNG file and what it shows, by their headings.
        mixing: one of each layer, folded away.
        prompt: what the model read, if it read something.
    """
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells(row)) + "</tr>\n" for row in rows)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>',
        f"<p>{html.escape(LEGEND)}</p>",
    ]
    if prompt is not None:
        parts.append(f"<p>The prompt:</p><pre>{html.escape(prompt)}</pre>")
    for name, (figure, caption) in figures.items():
        parts.append(f"<h2>{html.escape(name)}</h2>{_image(figure, name)}<p>{html.escape(caption)}</p>")
    parts.append("<h2>Mixing tensors</h2>")
    for layer, figure in mixing.items():
        parts.append(
            f"<details><summary>Layer {layer}</summary>{_image(figure, f'Mixing of layer {layer}')}</details>"
        )
    content = "\n".join(parts)
    file.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{content}\n</body></html>\n",
        encoding="utf-8",
    )


def _image(file: Path, description: str) -> str:
    encoded = base64.b64encode(file.read_bytes()).decode()
    return f'<div class="wide"><img alt="{html.escape(description)}" src="data:image/png;base64,{encoded}"></div>'
