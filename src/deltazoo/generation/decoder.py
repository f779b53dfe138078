"""A decoding loop over a static cache, whose step writes its own next input.

    prompt -> [pieces through the chunk kernels] -> state -> step -> token -> step -> token ...

Everything that a step reads and writes stays at its address: states, tokens, and which rows have ended. So on a GPU the
step, sampling included, is one CUDA graph. The host only starts the next replay while it yields the token before.

Step, draws and cache layers are those of the server's table (`deltazoo.generation.row_table`), but the loop is another:
rows that begin together run their prompts in one pass, whose states stay in place. Rows aligned at their last token may
have softmax layers with windows, which rows of different lengths cannot.
"""

import inspect
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from deltazoo.generation.batch import refuse_padding_at_the_end
from deltazoo.generation.capture import read_later
from deltazoo.generation.conditions import check_model, check_positions, origin_of_nan
from deltazoo.generation.hf_generate import without_single_tokens
from deltazoo.generation.sampling import Sampler, Sampling, Way
from deltazoo.generation.static_cache import fixed_cache
from deltazoo.generation.step import CapturedStep, next_logits, prepared_inputs
from deltazoo.names import did_you_mean


class Decoder:
    """A decoding loop of one model for one batch size; keep it to reuse its captured step.

    Args:
        model: a causal language model with delta-rule layers: ours, swapped or accelerated; in evaluation mode, on the
            device where it stays. The captured step arranges its weights in memory (`generation.step_modules`); if they
            move later, a new step is captured.
        batch_size: number of rows.
        max_length: most tokens of prompt and continuation. Softmax layers reserve keys, values and masks for so many;
            our models without such layers need no maximum.
        sampling: settings of the draws; default: the likeliest token each time.
        eos_token_id: tokens that end a row; default: the model's own. An empty sequence: none.
        pad_token_id: token that follows an end while other rows continue; default: the model's own, else the first end.
        prefill_chunk: tokens of the prompt per forward pass, at least 2 (1 counts as 2); default: all at once. The
            state passes from piece to piece, so the result is the same, and a long prompt needs the memory of one
            piece.
        seed: row i draws with `seed + i`, as choice i of the server does.

    Raises:
        ValueError: a model that the loop cannot run, rules in its generation config that the loop does not compute, or
            an option out of its range.
        TypeError: `sampling` of another class.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 1,
        *,
        max_length: int | None = None,
        sampling: Sampling | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        prefill_chunk: int | None = None,
        seed: int = 0,
    ) -> None:
        check_model(model)
        self.cache = fixed_cache(model, max_length)
        # The model makes masks for a softmax layer, also for one that a swap has replaced.
        masked = (isinstance(x, StaticLayer) or getattr(x, "mask_length", None) is not None for x in self.cache.layers)
        self._makes_masks = any(masked)
        if self._makes_masks and max_length is None:
            raise ValueError("max_length is needed: softmax layers and their masks take memory for every token")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a deltazoo.generation.Sampling, got {sampling!r}")
        self.model = model
        self.max_length = max_length
        self.sampling = sampling or Sampling()
        self.prefill_chunk = without_single_tokens(prefill_chunk)
        vocab_size = model.config.get_text_config().vocab_size
        for name, given in (("eos_token_id", eos_token_id), ("pad_token_id", pad_token_id)):
            if any(not 0 <= token < vocab_size for token in _as_list(given)):
                raise ValueError(f"{name} must be of the {vocab_size} tokens of the vocabulary, got {given}")
        ends = _as_list(model.generation_config.eos_token_id if eos_token_id is None else eos_token_id)
        pad = model.generation_config.pad_token_id if pad_token_id is None else pad_token_id
        self.sampler = Sampler(batch_size, model.device, ends, pad if pad is not None else (ends or [0])[0])
        self.sampler.put(slice(None), self.sampling, seed=0)
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
        self.real = torch.ones(batch_size, max_length or 1, dtype=torch.long, device=model.device)
        self._captured: CapturedStep | None = None
        self._streams_begun = 0
        self.seed = self._checked(seed)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the new tokens of all rows `[B]` int64 on the CPU, step by step, until every row has ended.

        A decoder has one cache: the first token of a stream ends the stream before.

        Args:
            input_ids: `[B, T]`, T at least 1.
            attention_mask: `[B, T]`, 1 = real, 0 = padding, on the left.
            max_new_tokens: the most tokens to add.
            seed: seed in place of the decoder's. One seed draws the same tokens from the same logits.

        Raises:
            ValueError: a seed of more than 64 bits, or a prompt that does not fit the decoder.
            TypeError: `input_ids` that are no tensor.
            RuntimeError: raised by the iterator; another stream of this decoder has begun.
            FloatingPointError: raised by the iterator; the model computed NaN or infinite logits for a row that has not
                ended.
        """
        self._check(input_ids, attention_mask, max_new_tokens)
        mask = None if attention_mask is None else attention_mask.long()
        return self._stream(input_ids, mask, max_new_tokens, self.seed if seed is None else self._checked(seed))

    def _checked(self, seed: int) -> int:
        """The seed; ValueError unless it and the seeds of further rows have 64 bits."""
        most = 2**63 - len(self.token)
        if not isinstance(seed, int) or not -(2**63) <= seed <= most:
            raise ValueError(f"seed must be a whole number from {-(2**63)} to {most}, got {seed!r}")
        return seed

    def _stream(
        self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, seed: int
    ) -> Iterator[Tensor]:
        self._streams_begun += 1
        number = self._streams_begun
        self.sampler.seed.copy_(torch.arange(len(input_ids), device=input_ids.device)[:, None] + seed)
        self._prefill(input_ids, attention_mask)
        # A GPU works on the next token while the host reads the last one; a CPU does one thing at a time.
        ahead = 1 if self.token.device.type == "cuda" else 0
        waiting = deque([read_later(self.token[:, 0])])
        ended = torch.zeros(len(input_ids), dtype=torch.bool)
        ends = self.sampler.ends.cpu()
        read = array("q")
        for made in range(1, max_new_tokens + 1):
            while len(waiting) > (ahead if made < max_new_tokens else 0):
                token = waiting.popleft()()
                if token.min() < 0:
                    raise self._nan_error(token, input_ids, attention_mask, read)
                read.extend(token.tolist())
                yield token
                ended |= torch.isin(token, ends)
                if ended.all():
                    return
            if made < max_new_tokens:
                if number != self._streams_begun:
                    raise RuntimeError(
                        "another stream of this decoder has begun, and the state of this one is gone: use one Decoder "
                        "per stream, or a batch"
                    )
                self._advance(first=made == 1)
                waiting.append(read_later(self.token[:, 0]))

    def _nan_error(
        self, token: Tensor, input_ids: Tensor, mask: Tensor | None, read: Sequence[int]
    ) -> FloatingPointError:
        """The error for tokens `[B]` of which one is `NO_TOKEN`; `read` holds those of the steps before."""
        row = int(token.argmin())
        prompt = input_ids[row] if mask is None else input_ids[row][mask[row] != 0]
        ids = torch.tensor([*prompt.tolist(), *read[row :: len(token)]], device=input_ids.device)
        return FloatingPointError(
            f"the model computed NaN or infinite logits for new token {len(read) // len(token) + 1} of row {row}"
            f"{origin_of_nan(self.model, ids[None])}"
        )

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int) -> None:
        _check_prompt(input_ids)
        batch_size = len(self.token)
        if input_ids.shape[0] != batch_size:
            raise ValueError(f"input_ids must have shape [{batch_size}, T] with T >= 1, got {tuple(input_ids.shape)}")
        if input_ids.device != self.token.device:
            raise ValueError(f"input_ids must be on the model's device {self.token.device}, got {input_ids.device}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        if attention_mask is not None:
            others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
            if len(others):
                raise ValueError(f"attention_mask must be 1 for real tokens and 0 for padding, got {others[0].item()}")
            refuse_padding_at_the_end(attention_mask)
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        longest = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
        what = f"{longest} prompt tokens and {max_new_tokens} new ones"
        check_positions(self.model, longest + max_new_tokens, what)
        if self.max_length is not None and input_ids.shape[1] + max_new_tokens > self.max_length:
            raise ValueError(
                f"{input_ids.shape[1]} prompt tokens and {max_new_tokens} new ones exceed max_length={self.max_length}"
            )

    @torch.no_grad()
    def _prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Run the prompt from an empty state and draw the first token."""
        self.cache.reset()
        num_tokens = input_ids.shape[1]
        if self._makes_masks:
            self.real.fill_(1)
            if attention_mask is not None:
                self.real[:, :num_tokens] = attention_mask
        done = 0
        for piece in input_ids.split(self.prefill_chunk or num_tokens, dim=1):
            done += piece.shape[1]
            mask = positions = None
            if attention_mask is not None:
                mask = attention_mask[:, :done]
            if self._makes_masks:
                positions = (self.real[:, :done].cumsum(1) - 1).clamp(min=0)[:, -piece.shape[1] :]
            inputs = prepared_inputs(self.model, piece, self.cache, mask, positions, is_first_iteration=True)
            output = self.model(**inputs)
        if attention_mask is None:
            self.position.fill_(num_tokens)
        else:
            self.position.copy_(attention_mask.sum(1, keepdim=True))
        self.sampler.finished.zero_()
        self._draw(output.logits[:, -1])

    def _draw(self, logits: Tensor) -> None:
        self.sampler.choose(logits, self.position, Way.of(self.sampling), self.token)

    def _step(self) -> None:
        """Compute the next token from the current one."""
        mask, positions = (self.real, self.position) if self._makes_masks else (None, None)
        with self.model._optimize_model_for_decode():  # on a GPU steps compute experts by another implementation
            logits = next_logits(self.model, self.token, self.cache, mask, positions)
        self.position.add_(1)
        self._draw(logits)

    @torch.no_grad()
    def _advance(self, first: bool) -> None:
        """Replay the step; before the first of a prompt, capture it again if the model has changed."""
        if self._captured is None or (first and not self._captured.is_valid_for(self.model)):
            changed = [self.token, self.sampler.finished, self.position]
            self._captured = CapturedStep(self.model, self._step, self.cache, changed)
        self._captured.replay()


def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
    prefill_chunk: int | None = None,
    streamer: BaseStreamer | None = None,
    **unknown: Any,
) -> Tensor:
    """Prompts continued by the loop of `Decoder`; greedy tokens equal those of `model.generate(do_sample=False)`.

    Args:
        model: see `Decoder`.
        input_ids: `[B, T]` int64.
        attention_mask: `[B, T]`, 1 = real, 0 = padding, on the left.
        max_new_tokens: the most tokens to add.
        temperature, top_k, top_p: see `Sampling`; temperature 0 takes the likeliest token.
        eos_token_id, pad_token_id, seed, prefill_chunk: see `Decoder`.
        streamer: object that receives the prompt and then every token at once, see transformers.

    Returns:
        `[B, T + new]` int64: the prompts and their continuations.

    Raises:
        ValueError: a model that the loop cannot run, rules in its generation config that the loop does not compute, a
            prompt that does not fit, or an option out of its range.
        TypeError: `input_ids` that are no tensor, or an unknown option.
        FloatingPointError: the model computed NaN or infinite logits for a row that has not ended; the message names
            the row, and the module in whose output NaN comes first, if a forward pass over the row's tokens shows it.
    """
    for name in unknown:
        near = did_you_mean(name, inspect.signature(generate).parameters, cutoff=0.75)
        hint = near or "; other options of transformers are those of model.generate"
        raise TypeError(f"generate() got an unexpected argument {name!r}{hint}")
    _check_prompt(input_ids)
    decoder = Decoder(
        model,
        len(input_ids),
        max_length=input_ids.shape[-1] + max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        prefill_chunk=prefill_chunk,
        seed=seed,
    )
    steps = decoder.stream(input_ids, attention_mask, max_new_tokens=max_new_tokens)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    made = []
    for token in steps:
        made.append(token)
        if streamer is not None:
            streamer.put(token)
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, torch.stack(made, dim=1).to(input_ids.device)], dim=1)


def _check_prompt(input_ids: Any) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            "input_ids must be a tensor of token ids [B, T], from a tokenizer: "
            f'tokenizer(text, return_tensors="pt").input_ids; got {type(input_ids).__name__}'
        )
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must have shape [B, T] with B and T >= 1, got {tuple(input_ids.shape)}")


def _as_list(tokens: int | Sequence[int] | None) -> list[int]:
    if tokens is None:
        return []
    return [tokens] if isinstance(tokens, int) else list(tokens)
