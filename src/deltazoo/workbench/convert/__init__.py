"""Conversion: rank the layers of a model, and train in the delta-rule layers that replaced its softmax attention.

The stages and their configuration (``conversion_config``) are read without torch; the rest is imported when it is first
asked for. ``deltazoo.swap`` replaces the layers.
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
