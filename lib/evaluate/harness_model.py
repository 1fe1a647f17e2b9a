"""What lm-evaluation-harness asks of a model: methods that take texts, and ask all ranks about token ids.

The harness (package `lm_eval`) runs on rank 0 alone. It calls `loglikelihood`, `loglikelihood_rolling` and
`generate_until` with instances, of which only `args` is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lib.config.schema import Config
from lib.data.chat import ChatTemplate, template_of
from lib.data.record_formats import Unusable
from lib.data.tokenizer import TextTokens, Tokenizer, limits_of, stored_config
from lib.errors import UserError
from lib.evaluate.harness_worker import Generated, Scored
from lib.model import load
from lib.system.model_folder import context_tokens
from lib.training.inputs import vocabulary

GENERATED = 256  # most tokens of an answer, where a task does not say
LONGEST = 2048  # tokens, where a model does not say how many it can see


class Instance(Protocol):
    """What is needed of a request of the harness, lm_eval.api.instance.Instance."""

    @property
    def args(self) -> tuple[Any, ...]: ...


class HarnessModel:
    """The methods of lm_eval.api.model.LM, which it is mixed into where that package is installed.

    Args:
        ask: `HarnessWorker.ask`.
    """

    def __init__(
        self, ask: Callable[[str, Sequence[Any]], list[Any]], tokenizer: Tokenizer, settings: Config, name: str
    ):
        super().__init__()
        self.ask, self.settings, self.name = ask, settings, name
        self.template = ChatTemplate(tokenizer, settings.data)
        self.inner = TextTokens(tokenizer).inner
        self.tokenizer = tokenizer
        self.longest, self.limits = longest_input(settings), limits_of(vocabulary(settings.model))
        start = self.inner.bos_token_id if self.inner.bos_token_id is not None else self.inner.eos_token_id
        self.start_id: int = start
        self.start_text = str(self.inner.decode([start]))

    @property
    def tokenizer_name(self) -> str:
        """What requests are kept by."""
        return self.name

    # ---- Log-probabilities

    def loglikelihood(self, requests: Sequence[Instance], **_: object) -> list[tuple[float, bool]]:
        """Log-probability of each (context, continuation), and whether greedy decoding would write it."""
        return self._scores([self.encode_pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Instance], **_: object) -> list[float]:
        """Log-probability of each whole text, a long one in windows of all that the model can see."""
        windows = [rolling_windows(self.encode(request.args[0]), self.start_id, self.longest) for request in requests]
        scores = iter(self._scores([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of (context, continuation) in token ids. Each context is asked once, the longest first."""
        fitted = [fitting(context, continuation, self.longest) for context, continuation in pairs]
        contexts: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        for context, continuation in fitted:
            if continuation:
                of_context = contexts.setdefault(tuple(context), {})
                of_context.setdefault(tuple(continuation), len(of_context))
        order = sorted(contexts, key=lambda context: -len(context) - max(map(len, contexts[context])))
        items = [Scored(list(context), [list(c) for c in contexts[context]]) for context in order]
        scores = dict(zip(order, self.ask("scores", items), strict=True))
        certain = (0.0, True)  # of no token at all
        found = [scores[tuple(context)][contexts[tuple(context)][tuple(c)]] if c else certain for context, c in fitted]
        return [(float(logp), bool(is_greedy)) for logp, is_greedy in found]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of a text and of what follows it: where tokens begin is decided by both together.

        Spaces at the context's end belong to the continuation, as tokenizers have it. After no context the text opens
        with the model's first token.
        """
        if not context:
            ids = self.encode(continuation, opens=False)
            return ([self.start_id], ids) if ids[:1] != [self.start_id] else (ids[:1], ids[1:])
        stripped = context.rstrip()
        whole = self.encode(context + continuation)
        length = len(self.encode(stripped))
        return (whole[:length], whole[length:]) if length else ([self.start_id], whole)

    def encode(self, text: str, opens: bool | None = None) -> list[int]:
        """Token ids. opens: with the tokenizer's opening tokens; by default unless the text has them already.

        Raises:
            UserError: the tokenizer makes ids that the model does not know.
        """
        if opens is None and self.start_text and text.startswith(self.start_text):
            opens = False
        options = {} if opens is None else {"add_special_tokens": opens}
        ids = list(self.inner.encode(text, **options))
        try:
            self.limits.check_ids([ids])
        except Unusable as why:
            raise UserError(f"{self.name}: a task's text {text[:60]!r}: {why}") from None
        return ids

    # ---- Answers

    def generate_until(self, requests: Sequence[Instance], **_: object) -> list[str]:
        """What the model writes after each context, up to the first stop text."""
        items = [self._generated(*request.args) for request in requests]
        order = sorted(range(len(items)), key=lambda i: -len(items[i].context))
        texts: list[str] = [""] * len(items)
        for index, text in zip(order, self.ask("answers", [items[index] for index in order]), strict=True):
            texts[index] = text
        return texts

    def _generated(self, context: str, options: dict[str, Any]) -> Generated:
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        max_tokens = int(next((options[name] for name in names if options.get(name) is not None), GENERATED))
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        temperature = float(options.get("temperature") or 0.0)
        if options.get("do_sample") and not temperature:
            temperature = 1.0  # as transformers has it
        room = self.longest - max_tokens
        if room <= 0:
            raise UserError(f"a task wants {max_tokens} tokens of a model that sees {self.longest}; set max_gen_toks")
        ids = self.encode(context)[-room:]
        greedy = options.get("do_sample") is False
        return Generated(ids or [self.start_id], until, max_tokens, 0.0 if greedy else temperature)

    # ---- Chats

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, as training rendered it (data.chat_template).

        Raises:
            UserError: the template refuses it.
        """
        own = template_of(self.settings.data)
        options = {
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
            **({} if own is None else {"chat_template": own}),
            **self.template.arguments_without_answer,
        }
        try:
            return str(self.inner.apply_chat_template(chat_history, **options))
        except Exception as error:  # whatever the template's author chose
            raise UserError(f"--chat: the chat template refuses a task's conversation: {error}") from error

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text, which the harness keeps with its results."""
        return self.template.text if chat_template else ""


def longest_input(settings: Config) -> int:
    """How many tokens the model can see at once, by its config.json and its table of positions."""
    known = (context_tokens(stored_config(settings.model)), load.table_sizes(settings.model).positions)
    return min((tokens for tokens in known if tokens is not None), default=LONGEST)


def fitting(context: list[int], continuation: list[int], longest: int) -> tuple[list[int], list[int]]:
    """The pair, without the beginning of a context that is too long: the last token is predicted and not seen.

    Raises:
        UserError: the continuation alone is too long.
    """
    if len(continuation) > longest:
        raise UserError(f"a continuation of {len(continuation):,} tokens does not fit a model that sees {longest:,}")
    return context[-(longest + 1 - len(continuation)) :], continuation


def rolling_windows(ids: list[int], start_id: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """A text as (context, continuation) pairs that predict each token once, with all the context that fits."""
    windows = []
    for begin in range(0, len(ids), longest):
        end = min(begin + longest, len(ids))
        context = ids[end - longest - 1 : begin] if begin else [start_id]
        windows.append((context, ids[begin:end]))
    return windows
