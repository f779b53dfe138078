"""The model classes of the Hub types: the model of `modeling` under the class names that checkpoints record.

transformers' Auto classes need one class per configuration and head; the classes differ in nothing else. Those that
generate list `GenerationMixin` among their bases, where transformers' own tests expect it.
"""

from typing import Any

from transformers.generation import GenerationMixin
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from deltazoo.models.auto_map import class_name
from deltazoo.models.configuration import DeltaRuleConfig
from deltazoo.models.forward_arguments import tell_of_row_head
from deltazoo.models.hub_configs import (
    CombaConfig,
    DeltaNetConfig,
    EFLAConfig,
    GatedDeltaNetConfig,
    GatedDeltaProductConfig,
    GatedLinearAttentionConfig,
    KDAConfig,
    PrecondGatedDeltaNetConfig,
    PrecondKDAConfig,
)
from deltazoo.models.modeling import DeltaRuleForCausalLM, DeltaRuleModel, DeltaRulePreTrainedModel

__all__ = [
    "CombaForCausalLM",
    "CombaForQuestionAnswering",
    "CombaForSequenceClassification",
    "CombaForTokenClassification",
    "CombaModel",
    "DeltaNetForCausalLM",
    "DeltaNetForQuestionAnswering",
    "DeltaNetForSequenceClassification",
    "DeltaNetForTokenClassification",
    "DeltaNetModel",
    "DeltaRuleForQuestionAnswering",
    "DeltaRuleForSequenceClassification",
    "DeltaRuleForTokenClassification",
    "EFLAForCausalLM",
    "EFLAForQuestionAnswering",
    "EFLAForSequenceClassification",
    "EFLAForTokenClassification",
    "EFLAModel",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetForQuestionAnswering",
    "GatedDeltaNetForSequenceClassification",
    "GatedDeltaNetForTokenClassification",
    "GatedDeltaNetModel",
    "GatedDeltaProductForCausalLM",
    "GatedDeltaProductForQuestionAnswering",
    "GatedDeltaProductForSequenceClassification",
    "GatedDeltaProductForTokenClassification",
    "GatedDeltaProductModel",
    "GatedLinearAttentionForCausalLM",
    "GatedLinearAttentionForQuestionAnswering",
    "GatedLinearAttentionForSequenceClassification",
    "GatedLinearAttentionForTokenClassification",
    "GatedLinearAttentionModel",
    "KDAForCausalLM",
    "KDAForQuestionAnswering",
    "KDAForSequenceClassification",
    "KDAForTokenClassification",
    "KDAModel",
    "PrecondGatedDeltaNetForCausalLM",
    "PrecondGatedDeltaNetForQuestionAnswering",
    "PrecondGatedDeltaNetForSequenceClassification",
    "PrecondGatedDeltaNetForTokenClassification",
    "PrecondGatedDeltaNetModel",
    "PrecondKDAForCausalLM",
    "PrecondKDAForQuestionAnswering",
    "PrecondKDAForSequenceClassification",
    "PrecondKDAForTokenClassification",
    "PrecondKDAModel",
]


def model_class_of(config: type[DeltaRuleConfig], head: str) -> type[Any]:
    """The model class of a configuration class, with one of `deltazoo.models.auto_map.HEADS`."""
    return globals()[class_name(config.__name__, head)]


class _TakesRuntimeOptions(DeltaRulePreTrainedModel):
    """Accepts runtime options in the constructor; transformers' heads accept only a configuration."""

    def __init__(self, config: DeltaRuleConfig, **runtime: Any) -> None:
        super().__init__(config)
        tell_of_row_head(self)
        self.set_runtime(**runtime)


class DeltaRuleForSequenceClassification(
    _TakesRuntimeOptions, GenericForSequenceClassification, DeltaRulePreTrainedModel
):
    """The decoder with a head that classifies a sequence by its last token."""


class DeltaRuleForTokenClassification(_TakesRuntimeOptions, GenericForTokenClassification, DeltaRulePreTrainedModel):
    """The decoder with a head that classifies every token."""


class DeltaRuleForQuestionAnswering(_TakesRuntimeOptions, GenericForQuestionAnswering, DeltaRulePreTrainedModel):
    """The decoder with a head that finds the start and the end of an answer."""

    # The generic head expects the embedding under another name than fla-hub's.
    get_input_embeddings = DeltaRulePreTrainedModel.get_input_embeddings
    set_input_embeddings = DeltaRulePreTrainedModel.set_input_embeddings


class DeltaNetModel(DeltaRuleModel):
    """DeltaNet, the decoder without a head."""

    config_class = DeltaNetConfig


class DeltaNetForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """DeltaNet, with a language-modelling head."""

    config_class = DeltaNetConfig


class DeltaNetForSequenceClassification(DeltaRuleForSequenceClassification):
    """DeltaNet, with a head for sequences."""

    config_class = DeltaNetConfig


class DeltaNetForTokenClassification(DeltaRuleForTokenClassification):
    """DeltaNet, with a head for every token."""

    config_class = DeltaNetConfig


class DeltaNetForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """DeltaNet, with a head for answers."""

    config_class = DeltaNetConfig


class GatedDeltaNetModel(DeltaRuleModel):
    """Gated DeltaNet, the decoder without a head."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Gated DeltaNet, with a language-modelling head."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForSequenceClassification(DeltaRuleForSequenceClassification):
    """Gated DeltaNet, with a head for sequences."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForTokenClassification(DeltaRuleForTokenClassification):
    """Gated DeltaNet, with a head for every token."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Gated DeltaNet, with a head for answers."""

    config_class = GatedDeltaNetConfig


class KDAModel(DeltaRuleModel):
    """Kimi Delta Attention, the decoder without a head."""

    config_class = KDAConfig


class KDAForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Kimi Delta Attention, with a language-modelling head."""

    config_class = KDAConfig


class KDAForSequenceClassification(DeltaRuleForSequenceClassification):
    """Kimi Delta Attention, with a head for sequences."""

    config_class = KDAConfig


class KDAForTokenClassification(DeltaRuleForTokenClassification):
    """Kimi Delta Attention, with a head for every token."""

    config_class = KDAConfig


class KDAForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Kimi Delta Attention, with a head for answers."""

    config_class = KDAConfig


class EFLAModel(DeltaRuleModel):
    """Error-free linear attention, the decoder without a head."""

    config_class = EFLAConfig


class EFLAForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Error-free linear attention, with a language-modelling head."""

    config_class = EFLAConfig


class EFLAForSequenceClassification(DeltaRuleForSequenceClassification):
    """Error-free linear attention, with a head for sequences."""

    config_class = EFLAConfig


class EFLAForTokenClassification(DeltaRuleForTokenClassification):
    """Error-free linear attention, with a head for every token."""

    config_class = EFLAConfig


class EFLAForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Error-free linear attention, with a head for answers."""

    config_class = EFLAConfig


class GatedDeltaProductModel(DeltaRuleModel):
    """Gated DeltaProduct, the decoder without a head."""

    config_class = GatedDeltaProductConfig


class GatedDeltaProductForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Gated DeltaProduct, with a language-modelling head."""

    config_class = GatedDeltaProductConfig


class GatedDeltaProductForSequenceClassification(DeltaRuleForSequenceClassification):
    """Gated DeltaProduct, with a head for sequences."""

    config_class = GatedDeltaProductConfig


class GatedDeltaProductForTokenClassification(DeltaRuleForTokenClassification):
    """Gated DeltaProduct, with a head for every token."""

    config_class = GatedDeltaProductConfig


class GatedDeltaProductForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Gated DeltaProduct, with a head for answers."""

    config_class = GatedDeltaProductConfig


class CombaModel(DeltaRuleModel):
    """Comba, the decoder without a head."""

    config_class = CombaConfig


class CombaForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Comba, with a language-modelling head."""

    config_class = CombaConfig


class CombaForSequenceClassification(DeltaRuleForSequenceClassification):
    """Comba, with a head for sequences."""

    config_class = CombaConfig


class CombaForTokenClassification(DeltaRuleForTokenClassification):
    """Comba, with a head for every token."""

    config_class = CombaConfig


class CombaForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Comba, with a head for answers."""

    config_class = CombaConfig


class PrecondKDAModel(DeltaRuleModel):
    """Preconditioned KDA, the decoder without a head."""

    config_class = PrecondKDAConfig


class PrecondKDAForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Preconditioned KDA, with a language-modelling head."""

    config_class = PrecondKDAConfig


class PrecondKDAForSequenceClassification(DeltaRuleForSequenceClassification):
    """Preconditioned KDA, with a head for sequences."""

    config_class = PrecondKDAConfig


class PrecondKDAForTokenClassification(DeltaRuleForTokenClassification):
    """Preconditioned KDA, with a head for every token."""

    config_class = PrecondKDAConfig


class PrecondKDAForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Preconditioned KDA, with a head for answers."""

    config_class = PrecondKDAConfig


class PrecondGatedDeltaNetModel(DeltaRuleModel):
    """Preconditioned Gated DeltaNet, the decoder without a head."""

    config_class = PrecondGatedDeltaNetConfig


class PrecondGatedDeltaNetForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Preconditioned Gated DeltaNet, with a language-modelling head."""

    config_class = PrecondGatedDeltaNetConfig


class PrecondGatedDeltaNetForSequenceClassification(DeltaRuleForSequenceClassification):
    """Preconditioned Gated DeltaNet, with a head for sequences."""

    config_class = PrecondGatedDeltaNetConfig


class PrecondGatedDeltaNetForTokenClassification(DeltaRuleForTokenClassification):
    """Preconditioned Gated DeltaNet, with a head for every token."""

    config_class = PrecondGatedDeltaNetConfig


class PrecondGatedDeltaNetForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Preconditioned Gated DeltaNet, with a head for answers."""

    config_class = PrecondGatedDeltaNetConfig


class GatedLinearAttentionModel(DeltaRuleModel):
    """Gated linear attention, the decoder without a head."""

    config_class = GatedLinearAttentionConfig


class GatedLinearAttentionForCausalLM(DeltaRuleForCausalLM, GenerationMixin):
    """Gated linear attention, with a language-modelling head."""

    config_class = GatedLinearAttentionConfig


class GatedLinearAttentionForSequenceClassification(DeltaRuleForSequenceClassification):
    """Gated linear attention, with a head for sequences."""

    config_class = GatedLinearAttentionConfig


class GatedLinearAttentionForTokenClassification(DeltaRuleForTokenClassification):
    """Gated linear attention, with a head for every token."""

    config_class = GatedLinearAttentionConfig


class GatedLinearAttentionForQuestionAnswering(DeltaRuleForQuestionAnswering):
    """Gated linear attention, with a head for answers."""

    config_class = GatedLinearAttentionConfig
