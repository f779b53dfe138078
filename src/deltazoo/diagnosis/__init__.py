"""Figures of the delta-rule layers of a model on a batch: `deltazoo.diagnose`, its picture, a callback for Trainer."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.diagnosis.diagnosis import DiagnoseCallback as DiagnoseCallback
    from deltazoo.diagnosis.diagnosis import Diagnosis as Diagnosis
    from deltazoo.diagnosis.diagnosis import LayerDiagnosis as LayerDiagnosis
    from deltazoo.diagnosis.diagnosis import diagnose as diagnose
    from deltazoo.diagnosis.rule_figures import Figures as Figures
    from deltazoo.diagnosis.rule_figures import GateShares as GateShares
    from deltazoo.diagnosis.rule_figures import Quantiles as Quantiles

__all__ = ["DiagnoseCallback", "Diagnosis", "Figures", "GateShares", "LayerDiagnosis", "Quantiles", "diagnose"]

__getattr__ = lazy_names(
    __name__,
    {
        "diagnosis": ("DiagnoseCallback", "Diagnosis", "LayerDiagnosis", "diagnose"),
        "rule_figures": ("Figures", "GateShares", "Quantiles"),
    },
)
