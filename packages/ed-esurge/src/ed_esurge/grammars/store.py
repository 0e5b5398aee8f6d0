"""Compiled grammars: tried in a child process, then compiled in this process, and cached."""

from __future__ import annotations

import functools
import heapq
import itertools
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_esurge.grammars.build import GrammarSource, build_matcher, grammar_text, make_tokenizer
from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.process import TrialProcess
from ed_esurge.grammars.reasoning import ThoughtEnds
from ed_esurge.sampling import StructuredOutputs
from ed_esurge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Maximum number of cached grammars that no request uses, and of queued grammars.
KEPT, MAX_WAITING = 128, 64
# Stack of the compiler thread. A trial has a quarter of it, so a grammar that passes fits here.
STACK = 2**27
# `threading.stack_size` is a setting of the whole process.
_STACK_LOCK = threading.Lock()


class GrammarsBusyError(ConfigError):
    """Too many grammars are queued for compilation."""


class Grammar:
    """A compiled grammar.

    Args:
        template: an `LLMatcher` at the beginning; used only for copies.
    """

    def __init__(self, template: LLMatcher) -> None:
        self._template = template

    def matcher(self) -> LLMatcher:
        """Return a new matcher at the beginning of the grammar."""
        return self._template.deep_copy()


class Grammars:
    """The grammars of one tokenizer. Thread-safe.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: vocabulary size of the model.
        eos_token_ids: tokens that are allowed at the end of a grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._hf = tokenizer
        self.eos_token_ids = sorted(eos_token_ids)
        self.size = max(vocab_size, len(tokenizer))
        """Number of tokens in a mask. The tokenizer may have more tokens than the model."""
        self._lock = threading.Lock()
        self._made: tuple[Any, TrialProcess] | None = None
        self._recent: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        # Includes older grammars while requests use them.
        self._known: weakref.WeakValueDictionary[GrammarSource, Grammar] = (
            weakref.WeakValueDictionary()
        )
        self._waiting: dict[GrammarSource, Future[Grammar]] = {}
        self._ends: dict[tuple[str, ...], ThoughtEnds] = {}
        self._compiler = _Compiler()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> Grammars | None:
        """Return the grammars of a tokenizer; None without a tokenizer."""
        return None if tokenizer is None else cls(tokenizer, vocab_size, eos_token_ids)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in llguidance's format.

        Raises:
            ConfigError: the tokenizer cannot be converted.
        """
        return self._prepare_backend()[0]

    @functools.cached_property
    def text_ends(self) -> Sequence[int]:
        """End-of-sequence tokens that a grammar would treat as text, if there are others."""
        special = {
            token_id for token_id in self.eos_token_ids if self.tokenizer.is_special_token(token_id)
        }
        return sorted({*self.eos_token_ids} - special) if special else ()

    def submit(self, structured_outputs: StructuredOutputs) -> Future[Grammar]:
        """Compile a grammar that a client sent, after a trial in a child process.

        Returns:
            a future of the grammar; it raises `ConfigError` for an invalid grammar. Equal grammars
            share one compilation.

        Raises:
            ConfigError: the tokenizer is not fast.
            GrammarsBusyError: too many grammars are queued.
        """
        if structured_outputs.after:
            self.thought_ends(structured_outputs.after)
        source = self._source(structured_outputs)
        with self._lock:
            result = self._waiting.get(source)
            if result is not None:
                return result
            result = Future()
            # A caller that cancels its future must not cancel the compilation for other callers.
            result.set_running_or_notify_cancel()
            cached_grammar = self._find(source)
            if cached_grammar is not None:
                result.set_result(cached_grammar)
                return result
            if len(self._waiting) >= MAX_WAITING:
                raise GrammarsBusyError(
                    f"{len(self._waiting)} grammars wait to be compiled, and no more may: try "
                    "again later"
                )
            self._waiting[source] = result
        try:
            trial = self._prepare_backend()[1].submit(source)
        except BaseException as error:
            self._settle(source, error)
            raise
        trial.add_done_callback(lambda done: self._handle_trial(source, done))
        return result

    def get(self, structured_outputs: StructuredOutputs) -> Grammar:
        """Return a grammar that was submitted before, in this process or in the leader.

        Raises:
            ConfigError: the grammar does not compile.
        """
        source = self._source(structured_outputs)
        with self._lock:
            cached_grammar = self._find(source)
        if cached_grammar is not None:
            return cached_grammar
        done: Future[Grammar] = Future()
        self._compiler.add(0.0, lambda: self._compile(source, None), done)
        try:
            grammar = done.result()
        except GrammarError as error:
            raise ConfigError(f"structured output: {error}") from None
        with self._lock:
            self._note(source, grammar)
        return grammar

    def thought_ends(self, texts: tuple[str, ...]) -> ThoughtEnds:
        """Return the detector of the end of reasoning. The first call decodes every token.

        Args:
            texts: see `StructuredOutputs.after`.
        """
        if texts not in self._ends:
            self._ends[texts] = ThoughtEnds(texts, self.tokenizer, self.size, self.eos_token_ids)
        return self._ends[texts]

    def forget(self, structured_outputs: StructuredOutputs) -> None:
        """Remove a grammar whose matcher has exceeded a limit. All copies share the lexer states,
        so each copy would exceed the limit."""
        source = self._source(structured_outputs)
        with self._lock:
            self._recent.pop(source, None)
            self._known.pop(source, None)

    def _source(self, structured_outputs: StructuredOutputs) -> GrammarSource:
        """Return the kind and the text of a structured output, the cache key of its grammar."""
        if structured_outputs.calls:
            calls = sorted(
                {parts for text in structured_outputs.calls for parts in self._spellings(text)},
                key=str,
            )
            return "schema_or_calls", (structured_outputs.json_schema, tuple(calls))
        kinds = ("json_schema", "regex", "choice", "grammar")
        return next(
            (kind, value)
            for kind in kinds
            if (value := getattr(structured_outputs, kind)) is not None
        )

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        """The ids of added tokens by their text."""
        return {token.content: id_ for id_, token in self._hf.added_tokens_decoder.items()}

    def _spellings(self, text: str) -> Iterable[tuple[str | int, ...]]:
        """Yield the ways to write a text: as text, and with its added tokens."""
        yield (text,)
        markers = sorted(
            (marker for marker in self._added_ids if marker in text), key=len, reverse=True
        )
        if markers:
            pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text)
            yield tuple(self._added_ids.get(piece, piece) for piece in pieces if piece)

    def _prepare_backend(self) -> tuple[Any, TrialProcess]:
        with self._lock:
            if self._made is None:
                backend = getattr(self._hf, "backend_tokenizer", None)
                if backend is None:
                    raise ConfigError("structured output needs a fast Hugging Face tokenizer")
                backend = copy(backend)
                backend.no_padding()
                backend.no_truncation()
                arguments = (backend.to_str(), self.size, self.eos_token_ids)
                trials = TrialProcess(arguments)
                trials.start()  # both processes read the tokenizer at the same time
                try:
                    tokenizer = make_tokenizer(*arguments)
                except ValueError as error:
                    raise ConfigError(
                        f"structured output is not possible with this tokenizer: {error}"
                    ) from None
                self._made = tokenizer, trials
            return self._made

    def _find(self, source: GrammarSource) -> Grammar | None:
        """Return a cached grammar or None. The caller must hold the lock."""
        cached_grammar = self._known.get(source)
        if cached_grammar is not None:
            self._note(source, cached_grammar)
        return cached_grammar

    def _note(self, source: GrammarSource, grammar: Grammar) -> None:
        """Mark a grammar as most recently used. The caller must hold the lock."""
        self._known[source] = self._recent[source] = grammar
        self._recent.move_to_end(source)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)

    def _handle_trial(self, source: GrammarSource, trial: Future[tuple[str, float]]) -> None:
        error = trial.exception()
        if error is not None:
            self._settle(source, error)
            return
        text, seconds = trial.result()
        done: Future[Grammar] = Future()
        done.add_done_callback(lambda done: self._settle(source, done.exception() or done.result()))
        self._compiler.add(seconds, lambda: self._compile(source, text), done)

    def _compile(self, source: GrammarSource, text: str | None) -> Grammar:
        matcher = build_matcher(self.tokenizer, grammar_text(source) if text is None else text)
        if matcher.is_error():
            raise GrammarError("the grammar does not compile: send a smaller one")
        return Grammar(matcher)

    def _settle(self, source: GrammarSource, outcome: Grammar | BaseException) -> None:
        """Set the result of the futures for a grammar."""
        with self._lock:
            if isinstance(outcome, Grammar):
                self._note(source, outcome)
            result = self._waiting.pop(source)
        if isinstance(outcome, GrammarError):
            result.set_exception(ConfigError(f"structured output: {outcome}"))
        elif isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)


class _Compiler:
    """A thread with a large stack that compiles grammars one by one, the fastest first."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._queue: list[tuple[float, int, Callable[[], Grammar], Future[Grammar]]] = []
        self._numbers = itertools.count()
        self._works = False

    def add(self, seconds: float, work: Callable[[], Grammar], done: Future[Grammar]) -> None:
        """Queue work with its expected duration in seconds."""
        with self._ready:
            heapq.heappush(self._queue, (seconds, next(self._numbers), work, done))
            if not self._works:
                self._works = True
                self._start()

    def _start(self) -> None:
        with _STACK_LOCK:
            usual = threading.stack_size(STACK)
            try:
                threading.Thread(target=self._run, name="esurge-grammars", daemon=True).start()
            finally:
                threading.stack_size(usual)

    def _run(self) -> None:
        while True:
            with self._ready:
                if not self._queue:
                    self._works = False
                    return
                *_, work, done = heapq.heappop(self._queue)
            try:
                grammar = work()
            except Exception as error:
                done.set_exception(error)
            except BaseException:  # a panic of the library
                done.set_exception(GrammarError("the grammar cannot be compiled: simplify it"))
            else:
                done.set_result(grammar)
