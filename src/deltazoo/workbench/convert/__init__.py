"""Conversion: train a model whose softmax attention was replaced by delta-rule layers, and rank layers to replace.

``deltazoo.swap`` replaces the layers. Reading a recipe imports no torch; the other names are imported on first use.
"""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names
from deltazoo.workbench.convert.conversion_config import STAGES, ConversionConfig, load_conversion

if TYPE_CHECKING:
    from deltazoo.workbench.convert.conversion import ConversionResult, convert, save_swapped
    from deltazoo.workbench.convert.conversion_plots import draw_conversion, draw_ranking
    from deltazoo.workbench.convert.layer_ranking import Ranking, rank_layers, ranking_rows

__all__ = [
    "STAGES",
    "ConversionConfig",
    "ConversionResult",
    "Ranking",
    "convert",
    "draw_conversion",
    "draw_ranking",
    "load_conversion",
    "rank_layers",
    "ranking_rows",
    "save_swapped",
]

__getattr__ = lazy_names(
    __name__,
    {
        "conversion": ("ConversionResult", "convert", "save_swapped"),
        "conversion_plots": ("draw_conversion", "draw_ranking"),
        "layer_ranking": ("Ranking", "rank_layers", "ranking_rows"),
    },
)
