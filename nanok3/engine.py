"""From prompts to replies: `Engine.load`, `engine.generate` (and `stream`), `engine.logits`.

Loads a model, turns prompts into requests and refuses what cannot be served. Many requests run at
once (`scheduler.py`); `submit` and `step` are what `generate`, `stream` and the batch command are
made of.

In strict mode rows are computed one by one, so that a request's bits never depend on its company
or on how its prompt was cut. Otherwise rows share products and the last bits may differ.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanok3.channels import STOP_TOKENS
from nanok3.chat import DEFAULT_EFFORT, render
from nanok3.checkpoint import Checkpoint
from nanok3.comm.exchange import Exchange
from nanok3.config import (
    WHOLE,
    EngineConfig,
    GenerationDefaults,
    ModelConfig,
    Shard,
    default_dtype,
    load_config,
    load_generation_defaults,
)
from nanok3.device import device_problems
from nanok3.grammar import Grammar, TokenTable, build_grammar
from nanok3.lockstep import Leader, Moves, Submit, follow
from nanok3.messages import read_messages, read_tools
from nanok3.packing import Places, empty_weights, layout_problems, packed_weights
from nanok3.plan import make_plan, summary
from nanok3.progress import Progress
from nanok3.reply import Event
from nanok3.request import Request, Result
from nanok3.runner import DTYPES, Runner
from nanok3.sampling import SamplingParams
from nanok3.scheduler import Scheduler
from nanok3.spec.config import DraftConfig, load_draft_config
from nanok3.spec.draft_weights import DraftWeights, build_draft, load_draft
from nanok3.speculation import step_problems
from nanok3.tokenizer import RANK_FILE, Tokenizer
from nanok3.weight_table import Filler, expected_tensors
from nanok3.weights import Weights, build

DEFAULT_MAX_TOKENS = 1024

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class RequestError(ValueError):
    """A request that cannot be served, whatever else runs; the message says why."""


class Engine:
    """A loaded model, its caches and the requests that run."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer | None,
        settings: EngineConfig,
        defaults: GenerationDefaults,
        draft: tuple[DraftConfig, DraftWeights] | None = None,
        shard: Shard = WHOLE,
        exchange: Exchange | None = None,
    ) -> None:
        """shard, exchange: of a rank with peers, which `load` lets lead or follow them."""
        self.config = config
        self.tokenizer = tokenizer
        self.settings = settings
        self.defaults = defaults
        self._runner = Runner(config, weights, settings, draft, shard, exchange)
        self._manager = self._runner.manager
        self._scheduler = Scheduler(self._runner)
        self._leader: Leader | None = None  # of other ranks
        self._end_ranks: Callable[[], object] | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str | None = None,
        settings: EngineConfig | None = None,
        draft: str | Path | None = None,
        progress: Progress | None = None,
        gpus: int | None = None,
    ) -> Engine:
        """The model of a checkpoint directory, ready to run.

        path: a directory in the official layout (config.json, index, shards, tiktoken.model).
        device: "cpu", "cuda" or "cuda:N" (Hopper or later; decodes from captured graphs).
        dtype: "float32", "bfloat16" or "float64", of weights and activations; else float32 on a
        CPU and bfloat16, the only one there, on a GPU.
        settings: everything else; its device, dtype and gpus give way to the arguments.
        draft: a directory with a DSpark draft of this model, to decode several tokens a step.
        gpus: processes that share the model, on a CPU too (there by memory of one machine). This
        one starts the others, unless torchrun or srun has started all of them; then only rank 0
        returns from here, and the others follow it to their ends.
        Raises FileNotFoundError, ConfigError, CheckpointError or ValueError, with every reason at
        once, before a weight is read. Without a tokenizer file only prompts of ids can be served.
        Raises PeerLost, here and later, when another rank is gone; the engine is then of no use.
        """
        path = Path(path)
        dtype = dtype or default_dtype(device)
        settings = replace(settings or EngineConfig(), device=device, dtype=dtype)
        settings = replace(settings, gpus=gpus or settings.gpus)
        if not path.is_dir():
            raise FileNotFoundError(
                f"{path}: no such directory; name one that holds a K3 checkpoint"
            )
        config = load_config(path)
        problems = settings.problems(config)
        shard = WHOLE if problems else Shard(0, settings.gpus)  # all need the same
        problems += shard.problems(config)
        if device != "cpu":
            problems += layout_problems(config, shard)
        if problems:
            raise ValueError("\n".join(problems))
        draft_config = None if draft is None else load_draft_config(Path(draft))
        if draft_config is not None:
            refused = draft_config.problems(config) + step_problems(settings, draft_config)
            if refused:
                raise ValueError("\n".join(f"{draft}: {problem}" for problem in refused))
        planned = make_plan(config, shard, settings, draft_config)
        problems = device_problems(device, dtype, planned.total_bytes, summary(planned))
        if problems:
            raise ValueError("\n".join(problems))
        defaults = load_generation_defaults(path)
        tokenizer = Tokenizer.load(path) if (path / RANK_FILE).is_file() else None
        if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
            raise ValueError(
                f"{path / RANK_FILE} has {tokenizer.vocab_size} ids with the specials, config.json "
                f"a vocab_size of {config.vocab_size}; take both from the same checkpoint"
            )
        tables = {form: expected_tensors(config, form) for form in ("mxfp4", "bf16")}
        drafts_from = config.num_hidden_layers if config.num_nextn_predict_layers else None
        checkpoint = Checkpoint.open(path, tables, skip_layers_from=drafts_from)
        names = checkpoint.in_file_order(checkpoint.specs)

        def engine_of(settings: EngineConfig, shard: Shard, exchange: Exchange | None) -> Engine:
            # On a GPU every tensor goes from the file to its place in the kernels' layouts.
            places = empty_weights(config, shard, device) if device != "cpu" else Places()
            filler = Filler(config, DTYPES[dtype], device, shard, puts=places.puts)
            shown = progress if shard.rank == 0 else None
            checkpoint.load(names, filler.take_part, part_of=filler.part_of, progress=shown)
            fields = (places.packed | filler.finish()).__getitem__
            if device == "cpu":
                weights = build(config, fields, shard)
            else:
                weights = packed_weights(config, fields)
            drafts = None
            if draft_config is not None:
                own = load_draft(Path(draft or ""), draft_config, DTYPES[dtype], device, progress)
                drafts = (
                    draft_config,
                    build_draft(draft_config, own.__getitem__, weights.embed, weights.lm_head),
                )
            return cls(config, weights, tokenizer, settings, defaults, drafts, shard, exchange)

        if settings.gpus == 1:
            return engine_of(settings, WHOLE, None)
        from nanok3.join import agree, join  # here, for few need it

        group = join(path, settings, None if draft is None else Path(draft))
        try:
            settings = agree(group, path, config, settings, draft_config)
            engine = engine_of(settings, group.shard, group.exchange())
            group.loaded()
        except BaseException as error:
            group.fail(error)
            raise
        if group.shard.rank > 0:
            follow(group.host, engine._moves())
        engine._leader = Leader(group.host)
        engine._end_ranks = weakref.finalize(engine, group.end, engine._leader)
        return engine

    # ---- public: prompts in, results out ----

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = DEFAULT_EFFORT,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> Result:
        """One reply, when it is whole.

        prompt: a text (one user message), messages in the OpenAI form, or ids (taken as they are;
        the reply is then plain text). params: `self.sampling()` gives the checkpoint's defaults.
        The other options are those of `chat.render`, and mean nothing for ids. A response_format of
        JSON and tool_choice "required" are enforced while decoding: such a reply ends when its
        form is whole, so stop strings, stop ids and min_tokens mean nothing for it.
        Raises RequestError where the request can never be served.
        """
        request = self.submit(
            prompt,
            params,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        try:
            self.run([request])
        finally:  # Ctrl-C, say
            self.cancel(request)
        return request.result()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = DEFAULT_EFFORT,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> Iterator[Event | Result]:
        """The same as events (`nanok3.reply`) while they come, and the `Result` last.

        Leaving the loop early cancels the request.
        """
        request = self.submit(
            prompt,
            params,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort,
            tool_choice=tool_choice,
            response_format=response_format,
        )
        try:
            while not request.done:
                self.step()
                yield from request.take_events()
            yield from request.take_events()  # it may have ended in a step of another's loop
            yield request.result()
        finally:
            self.cancel(request)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits [len, V] f32 (f64 in float64) after each of `token_ids`, computed on their own.

        Raises RequestError for no ids, an id outside the vocabulary, or more than the cache holds.
        """
        ids = list(token_ids)
        self._check_ids(ids, self.max_context)
        if self._leader is None:
            return self._logits(ids)
        return self._leader.logits(ids, lambda: self._logits(ids))

    def _logits(self, ids: list[int]) -> Tensor:
        request = Request(ids, SamplingParams(), frozenset(), 1, None, None)
        taken = self._manager.admit([], len(ids))
        if taken is None:
            raise RequestError("no room in the cache for these ids while other requests run")
        request.slot, request.blocks, _ = taken
        try:
            parts = []
            while request.num_pending:
                parts.append(self._runner.prefill(request, request.num_pending, with_logits=True))
            return torch.cat(parts)
        finally:
            self._manager.release(request.slot, request.blocks)

    def sampling(self, **options: Any) -> SamplingParams:
        """SamplingParams from `options`, then generation_config.json, then built-in defaults."""
        return SamplingParams(**(self.defaults.sampling | options))

    # ---- requests: the pieces that generate and batch are made of ----

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = DEFAULT_EFFORT,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
        before: Sequence[int] = (),
    ) -> Request:
        """A request in the queue; `step` moves it on. Raises RequestError if it can never run.

        before: ids of an earlier prompt and its reply. They stand for the beginning of the prompt
        if that is what they spell, so that what the cache holds of them is found again.
        """
        params = params or self.sampling()
        if problems := params.problems():
            raise RequestError("; ".join(problems))
        if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence):
            kind = type(prompt).__name__
            raise RequestError(f"a prompt must be text, a list of messages or of ids, not {kind}")
        if isinstance(prompt, str) and not prompt.strip():
            raise RequestError("the prompt is empty; give some text")
        message = {"role": "user", "content": prompt}
        items: list[Any] = [message] if isinstance(prompt, str) else list(prompt)
        if all(type(item) is int for item in items):
            ids, channel, grammar = items, None, None
        else:
            if self.tokenizer is None:
                raise RequestError("this checkpoint has no tiktoken.model; give ids, not text")
            try:
                segments = render(
                    items,
                    tools,
                    thinking=thinking,
                    thinking_effort=thinking_effort,
                    tool_choice=tool_choice,
                    response_format=response_format,
                )
                declared = [tool for m in read_messages(items) for tool in m.tools]
                grammar = build_grammar(
                    lambda: self._token_table,
                    tools=read_tools(tools, "tools") + declared,
                    thinking=thinking,
                    tool_choice=tool_choice,
                    response_format=response_format,
                )
            except ValueError as error:
                raise RequestError(str(error)) from error
            ids, channel = self.tokenizer.continue_segments(segments, before), thinking
        return self.submit_ids(ids, params, channel, grammar)

    def submit_ids(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        thinking: bool | None,
        grammar: Grammar | None = None,
    ) -> Request:
        """`submit` for a prompt that was rendered and encoded before.

        thinking: which channel the prompt leaves open; None: the reply is plain text.
        grammar: what the reply may be; None: anything.
        """
        request = self._request(list(ids), params, thinking, grammar)
        self._scheduler.waiting.append(request)
        if self._leader is not None:
            self._leader.submit(request, thinking)
        return request

    def run(self, requests: Sequence[Request]) -> None:
        """Steps until all of these are done."""
        while not all(request.done for request in requests):
            self.step()

    def cancel(self, request: Request) -> None:
        """Ends a request now; its partial output stays readable. Nothing happens if it is done."""
        if self._leader is not None:
            self._leader.cancel(request)
        self._scheduler.cancel(request)

    def close(self) -> None:
        """Lets the other ranks end, if there are any, as the end of the program does."""
        if self._end_ranks is not None:
            self._end_ranks()

    @property
    def reading(self) -> str:
        """What decode steps run through, for people."""
        return self._runner.reading

    @property
    def num_unfinished(self) -> int:
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    @property
    def max_context(self) -> int:
        """Tokens, prompt and reply together, that one request may have."""
        room = self._manager.blocks.size * self.settings.block_size
        longest = self.config.max_position_embeddings
        return min(room, longest, self.settings.max_context or longest)

    def step(self) -> None:
        """Moves every request on: prompts by a chunk of one of them, replies by an id each."""
        if self._leader is None:
            self._scheduler.step()
        else:
            self._leader.step(self._scheduler.step)

    # ---- inside ----

    def _moves(self) -> Moves:
        """What a rank does when rank 0 says so."""
        return Moves(self._take_up, self.cancel, self._scheduler.step, self._logits)

    def _take_up(self, sent: Submit) -> Request:
        """A request of rank 0's, as it is there."""
        grammar, table = None, self._token_table if sent.grammar is not None else None
        if table is not None and sent.grammar is not None:
            matcher = table.matcher(sent.grammar)
            grammar = Grammar(table, matcher, bool(sent.thinking), sent.grammar)
        request = Request(
            sent.ids,
            sent.params,
            sent.stop_ids,
            sent.max_tokens,
            self.tokenizer,
            sent.thinking,
            grammar,
        )
        request.gaps = [] if sent.keeps_gaps else None
        self._scheduler.waiting.append(request)
        return request

    @cached_property
    def _token_table(self) -> TokenTable:
        assert self.tokenizer is not None, "a grammar without a tokenizer"
        return TokenTable(self.tokenizer)

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        thinking: bool | None,
        grammar: Grammar | None,
    ) -> Request:
        self._check_ids(ids, self.max_context - 1)  # and at least one for the reply
        if self.tokenizer is None and params.stop:
            raise RequestError("this checkpoint has no tiktoken.model; stop strings need its text")
        room = self.max_context - len(ids)
        max_tokens = min(params.max_tokens or DEFAULT_MAX_TOKENS, room)
        ends = {self.config.eos_token_id, *self.defaults.eos_token_id, *params.stop_token_ids}
        if self.tokenizer is not None:
            own = {self.tokenizer.special_id(name) for name in STOP_TOKENS}
            ends = own if grammar is not None else ends | own
        if grammar is not None:  # it alone says when the reply may end
            params = replace(params, stop=(), min_tokens=0)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        params = replace(params, seed=seed, stop_token_ids=tuple(sorted(ends)))
        return Request(ids, params, frozenset(ends), max_tokens, self.tokenizer, thinking, grammar)

    def _check_ids(self, ids: Sequence[int], most: int) -> None:
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one")
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < self.config.vocab_size:
                raise RequestError(
                    f"id {token!r} is outside the vocabulary of {self.config.vocab_size}"
                )
        if len(ids) > most:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but there is room for {most} "
                f"(max_context {self.max_context}); shorten it, or raise max_context (--context)"
            )
