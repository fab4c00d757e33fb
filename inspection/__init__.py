"""Looking inside: what the mixing of a model has become, in figures and numbers."""

from .figures import draw_graph, draw_mixing, draw_patterns
from .page import write_page
from .patterns import Patterns, attention_patterns
from .statistics import LayerStatistics, by_layer, layer_statistics

__all__ = [
    "LayerStatistics",
    "Patterns",
    "attention_patterns",
    "by_layer",
    "draw_graph",
    "draw_mixing",
    "draw_patterns",
    "layer_statistics",
    "write_page",
]
