"""The suite `conversions`: the softmax model of the suite `text`, its attention swapped for delta-rule layers.

A converted model is trained through stages on rows of the suite's text, together a tenth of the tokens of the softmax
model, which is trained once per machine and kept in the user's cache.
"""

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from deltazoo.models import DeltaRuleForCausalLM
from deltazoo.swap import swap_attention, swapped_layers
from deltazoo.training.distill import choose_trained_parameters, divergence, teacher_forced
from experiments.configurations import SOFTMAX
from experiments.loop import Loop, autocast, rate_factor
from experiments.runner import Job, Line
from experiments.text.comparison import interval
from experiments.text.corpus import TextCorpus
from experiments.text.models import TextRecipe, build_model
from experiments.text.scoring import file_bytes, score
from experiments.text.suite import load_corpus, scored, training_loop, training_rows

DEFAULT_TEACHER_PATH = Path.home() / ".cache" / "deltazoo" / "text_softmax_model.pt"
CONTROL = (SOFTMAX, "none")
"""Rule and layers of the softmax model itself through distillation and fine-tuning: what further training gives."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage with a linear schedule: rates and schedules of `configs/swap_gpu.yaml`, more steps."""

    name: str
    """"align": each new layer learns the output of the attention it replaces; "distill": the model learns the
    predictions of the original, and the text; "finetune": the text."""
    steps: int
    rows: int
    rate: float
    warmup: float
    final: float = 0.0
    every: int
    """Steps between two scores."""

    @property
    def trains(self) -> str:
        """As of `StageConfig`."""
        return "swapped" if self.name == "align" else "all"

    def rate_factor(self, step: int) -> float:
        """Learning rate over its peak: linear warm-up, then a line."""
        return rate_factor(step, self.steps, round(self.warmup * self.steps), final=self.final, shape="line")


STAGES = (
    Stage(name="align", steps=2160, rows=1, rate=3e-3, warmup=0.036, every=540),
    Stage(name="distill", steps=576, rows=4, rate=3e-4, warmup=0.133, final=0.25, every=144),
    Stage(name="finetune", steps=112, rows=4, rate=7.5e-5, warmup=0.033, every=112),
)
RULES = ("gated_deltanet", "kda", "delta_net", "mamba2_style")
LAYERS = ("3:1", "1:1", "all")
_ALL = [(rule, layers, 0) for rule in RULES for layers in LAYERS]
_ALL += [(*CONTROL, 0), *(("gated_deltanet", layers, 1) for layers in LAYERS)]


def jobs(lines: list[Line], recipe: TextRecipe | None = None, stages: tuple[Stage, ...] = STAGES) -> list[Job]:
    """The softmax model at the rate that the suite `text` found for it; then the conversions, important ones first."""
    settings = {"recipe": asdict(recipe or TextRecipe()), "rate": 1e-3}
    teacher = {"id": "teacher", **settings}
    digests = [line["teacher"] for line in lines if line["id"] == "teacher"]
    if not digests:
        return [teacher]
    settings |= {"teacher": digests[0], "stages": [asdict(stage) for stage in stages]}
    return [
        teacher,
        *(
            {"id": f"{rule}@{layers} seed={seed}", "rule": rule, "layers": layers, "seed": seed, **settings}
            for rule, layers, seed in _ALL
        ),
    ]


def verdicts(lines: list[Line]) -> list[str]:
    """Bits per byte of the softmax model, and what every conversion adds to them, with the interval over files."""
    teacher = [line for line in lines if line["id"] == "teacher"]
    if not teacher:
        return []
    length = teacher[0]["recipe"]["row_length"]
    return [f"teacher: {interval(teacher, length)} bits per byte"] + [
        f"{line['id']}: {interval([line], length, minus=teacher)} beside it" for line in lines if line not in teacher
    ]


def convert(
    job: Job,
    device: str,
    tick: Callable[[], None],
    corpus: TextCorpus | None = None,
    teacher_path: Path = DEFAULT_TEACHER_PATH,
) -> dict[str, Any]:
    """Train the softmax model, or swap its attention and train the copy through the stages, and score it.

    The control skips alignment, which has nothing to align.
    """
    corpus = corpus or load_corpus()
    recipe = TextRecipe(**job["recipe"])
    teacher = _teacher(teacher_path, corpus, recipe, job["rate"], device, tick)
    digest = _digest(teacher)
    if job["id"] == "teacher":
        return {"corpus": corpus.digest, "teacher": digest, **scored(teacher, corpus, recipe)}
    if digest != job["teacher"]:
        raise ValueError(f"{teacher_path} holds the softmax model {digest}, the file's is {job['teacher']}")
    original = as_llama(teacher).requires_grad_(False)
    model = copy.deepcopy(original).requires_grad_(True)
    if (job["rule"], job["layers"]) != CONTROL:
        torch.manual_seed(job["seed"])
        swap_attention(model, job["rule"], layers=job["layers"])
    swapped = sorted(swapped_layers(model))
    if on_gpu := torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    size = file_bytes(corpus, recipe).sum()

    def bits() -> float:
        nats = score(model, corpus, recipe, [recipe.row_length])[str(recipe.row_length)]["file_nats"]
        return round(sum(nats) / math.log(2) / size, 5)

    points: list[tuple[str, int, float]] = [("transfer", 0, bits())]
    seconds, read = {}, 0
    stages = [Stage(**stage) for stage in job["stages"] if swapped or stage["name"] != "align"]
    for place, stage in enumerate(stages):
        choose_trained_parameters(model, stage)
        # The order is another than that in which the softmax model was trained, and differs between stages.
        order = 100 * (job["seed"] + 1) + place
        loop = Loop(
            model,
            training_rows(corpus.train, recipe.row_length, stage.rows, order, device),
            partial(_LOSSES[stage.name], original),
            rate=stage.rate,
            factor=stage.rate_factor,
            weight_decay=0.0,
        )
        for steps in dict.fromkeys((*range(stage.every, stage.steps, stage.every), stage.steps)):
            if not loop.advance(steps, tick):
                raise ArithmeticError(f"the loss of {stage.name} is not finite after {loop.steps} steps")
            points.append((stage.name, read + steps * stage.rows * recipe.row_length, bits()))
        seconds[stage.name] = round(loop.seconds, 2)
        read += stage.steps * stage.rows * recipe.row_length
    return {
        "corpus": corpus.digest,
        "swapped": swapped,
        "points": points,  # stage, tokens read since the swap, bits per byte in rows of the training length
        "stage_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        **scored(model, corpus, recipe),
    }


def _align(original: Any, model: Any, rows: Tensor) -> tuple[Tensor]:
    with autocast(rows.device), teacher_forced(model, original) as errors:
        model.model(input_ids=rows[:, :-1], use_cache=False)
    return (torch.stack(errors).mean(),)


def _distill(original: Any, model: Any, rows: Tensor) -> tuple[Tensor]:
    tokens = rows[:, :-1]
    with autocast(rows.device):
        with torch.no_grad():
            wanted = original(input_ids=tokens, use_cache=False).logits
        found = model(input_ids=tokens, use_cache=False).logits
        return (divergence(found, wanted) + ForCausalLMLoss(found, tokens, found.shape[-1]),)


def _finetune(original: Any, model: Any, rows: Tensor) -> tuple[Tensor]:
    tokens = rows[:, :-1]
    with autocast(rows.device):
        logits = model(input_ids=tokens, use_cache=False).logits
        return (ForCausalLMLoss(logits, tokens, logits.shape[-1]),)


_LOSSES: dict[str, Callable[..., tuple[Tensor]]] = {"align": _align, "distill": _distill, "finetune": _finetune}


def _teacher(
    path: Path, corpus: TextCorpus, recipe: TextRecipe, rate: float, device: str, tick: Callable[[], None]
) -> DeltaRuleForCausalLM:
    """The softmax model in evaluation mode: from the file if it holds that of this recipe, corpus and rate."""
    made_of = {"corpus": corpus.digest, "recipe": asdict(recipe), "rate": rate}
    if path.is_file():
        kept = torch.load(path, map_location="cpu", weights_only=True)
        if kept["of"] == made_of:
            with torch.device(device):
                model = build_model(SOFTMAX, recipe, corpus.vocab_size, seed=0)
            model.load_state_dict(kept["weights"])
            return model.eval()
    loop = training_loop(SOFTMAX, recipe, corpus, rate=rate, seed=0, device=device)
    if not loop.advance(recipe.steps, tick):
        raise ArithmeticError(f"the softmax model's loss is not finite after {loop.steps} steps")
    model: Any = loop.model.eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    torch.save({"of": made_of, "weights": {name: x.cpu() for name, x in model.state_dict().items()}}, draft)
    draft.replace(path)
    return model


def _digest(model: DeltaRuleForCausalLM) -> str:
    """Of the weights: only conversions of one softmax model compare."""
    content = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        content.update(name.encode() + tensor.float().cpu().numpy().tobytes())
    return content.hexdigest()[:12]


_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
)
_LLAMA_NAMES = (
    ("model.embeddings.", "model.embed_tokens."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".attn.", ".self_attn."),
)


def as_llama(model: DeltaRuleForCausalLM) -> LlamaForCausalLM:
    """The same model as transformers' Llama, in its dtype. Llama is a family that can be swapped.

    Raises:
        ValueError: a model with other layers than softmax attention.
    """
    config = model.config
    if set(config.layer_types or ()) != {"full_attention"}:
        raise ValueError(f"only softmax attention becomes a Llama, got layers {config.layer_types}")
    kept: dict[str, Any] = {name: getattr(config, name) for name in _LLAMA_KEYS}
    no_tokens: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama_config = LlamaConfig(**kept, **no_tokens, rms_norm_eps=config.norm_eps)
    with torch.device(model.device):  # made in its dtype: a later cast would round Llama's rotary frequencies
        llama = AutoModelForCausalLM.from_config(llama_config, dtype=model.dtype)
    llama.load_state_dict({_llama_name(name): tensor for name, tensor in model.state_dict().items()})
    return llama.eval()


def _llama_name(name: str) -> str:
    for ours, theirs in _LLAMA_NAMES:
        name = name.replace(ours, theirs)
    return name
