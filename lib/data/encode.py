"""Prompts and completions ➜ token ids and what of them is learnt, cut to data.max_length.

Where there is a chat template, the prompt is rendered as inference sends it, the whole conversation once more, and a
completion is what the whole has behind the prompt.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os.path
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from lib.config.settings import DataSettings
from lib.data import record_formats
from lib.data.chat import (
    EMPTY_THINKING,
    OPENED_THINKING,
    SENTINEL,
    ChatTemplate,
    Rendering,
    assistant_message,
    has_reasoning,
    lost,
)
from lib.data.record_formats import LISTED, TURN_MARKS, Chat, Message, Plain, Tokens, Unusable, bounds_of
from lib.data.tokenizer import SPECIMEN, TextTokens, Tokenizer
from lib.errors import UserError

# The end of a turn or a text that other models have, and what stands for media in LLaVA's and other data.
FOREIGN_END = re.compile(r"(<[|｜][^\s<>]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>)\s*$")
MEDIA_MARK = re.compile(
    r"<(?:image|video|audio|img|speech)>|<\|(?:image|video|audio)[^\s|]*\|>|<(?:Img|Image|Audio)Here>"
)
MARKS = re.compile(rf"{TURN_MARKS.pattern}|</?(?!\w*think)\w+>")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
HEADER_CHARACTERS = 12  # of a prompt's end, that tell it from other text


# ---- What is too long

LEAST_REST = 8  # a chat's answer keeps an eighth of max_length, or all of it where it is shorter


def _prompt_room(prompt: int, longest: int, max_length: int) -> int:
    """Tokens that a prompt of so many may keep beside the longest completion: at least a quarter of max_length."""
    return max(max_length - longest, min(prompt, max(1, max_length // 4)))


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut). The prompt
    is cut at its beginning, except for a leading BOS; a quarter of max_length is kept for it. A completion longer than
    the rest is cut at its end, and has no end token. All completions share one prompt."""
    longest = max(map(len, completions))
    if len(prompt) + longest <= max_length:
        return prompt, completions, False
    room = _prompt_room(len(prompt), longest, max_length)
    if room < len(prompt):
        has_bos = prompt[0] == bos_token_id
        prompt = prompt[:has_bos] + prompt[len(prompt) - room + has_bos :]
    return prompt, [completion[: max_length - room] for completion in completions], True


def _most_of_prompt(longest: int, max_length: int) -> int:
    """Tokens that a chat's prompt may have at most, so that its answer is not cut to nothing."""
    return max_length - min(longest, max(1, max_length // LEAST_REST))


def _shortened(chat: Chat, size: Callable[[Chat], int], longest: int, max_length: int) -> Chat:
    """The chat without the oldest exchanges, then without the beginning of its last question, as far as needed. size:
    tokens of a chat's prompt. longest: tokens of the longest completion."""
    questions = [index for index, message in enumerate(chat.prompt) if message["role"] == "user"]
    first, *later = questions or [0]
    opening = [m for m in chat.prompt[:first] if m["role"] in ("system", "developer")]
    exchanges = [chat, *(replace(chat, prompt=[*opening, *chat.prompt[start:]]) for start in later)]
    last, at = exchanges[-1].prompt, len(exchanges[-1].prompt) - len(chat.prompt) + [first, *later][-1]
    content = last[at]["content"] if questions else ""
    question = content if isinstance(content, str) else ""
    words = [i for i in range(1, len(question)) if question[i - 1].isspace() and not question[i].isspace()]
    starts = words or range(1, len(question))  # some languages write without spaces

    def form(number: int) -> Chat:
        if number < len(exchanges):
            return exchanges[number]
        shorter: Message = {**last[at], "content": question[starts[number - len(exchanges)] :]}
        return replace(chat, prompt=[*last[:at], shorter, *last[at + 1 :]])

    # Which forms may be taken, the longest first, and the tokens that a prompt may have then.
    whole, count, most = len(exchanges), len(exchanges) + len(starts), _most_of_prompt(longest, max_length)
    choices = [(1, whole, max_length - longest), (0, whole, most), (whole, count, most)]
    if all(len(answer) == 1 for answer in chat.completions):
        room = _prompt_room(size(chat), longest, max_length)
        choices = [(0, whole, room), (whole, count, room), (whole - 1, count, most)]
    for start, end, room in choices:
        fits = lambda number, room=room: size(form(number)) <= room  # noqa: E731
        fitting = bisect.bisect_left(range(end), True, start, key=fits)
        if fitting < end:
            return form(fitting)
    return exchanges[-1]


# ---- Text ➜ ids


class Encoder:
    """Prompts and completions ➜ token ids, through the tokenizer's chat template where there is one. eos_token_id: ends
    a completion that its template has not ended; by default the tokenizer's. Raises UserError: there is no end token,
    or data.chat_template cannot be read."""

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, eos_token_id: int | None) -> None:
        self.tokenizer, self.tokens = tokenizer, TextTokens(tokenizer)
        self.template = ChatTemplate(tokenizer, settings)
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        of_tokenizer: int | None = getattr(tokenizer, "eos_token_id", None)
        end_id = of_tokenizer if eos_token_id is None else eos_token_id
        if end_id is None:
            raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self._eos_token_id: int = end_id
        end_ids = getattr(tokenizer, "eos_token_ids", None)
        ends = {end_id, of_tokenizer, *(end_ids if isinstance(end_ids, set) else ())}
        self._stated_ends: set[int] = {token for token in ends if token is not None}
        self.notes: dict[str, None] = {}  # what was noticed of texts and template, a line each
        marks = sorted({mark for mark in MARKS.findall(self.template.turns) if mark.startswith("<")})
        if unknown := ", ".join(mark for mark in marks if len(self.tokens.ids(mark)) > 1):
            why = "it writes each as several tokens"
            self.notes[f"marks of the chat template are no tokens of the tokenizer: {unknown}; {why}"] = None

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens at which generation has to stop: those of the model, and the template's own end of a turn. That is the
        last added token behind an answer where the model names none of them, and the first one where it ends a
        question, too: Phi-3's <|end|>, before the <|endoftext|> that its tokenizer names. Kimi-K3's <|close|> has words
        behind it: it ends a part of the turn."""
        if not self.template.is_used:
            return self._stated_ends
        suffix = self._suffix(thinks=False)
        until = itertools.takewhile(lambda token: token not in self._stated_ends, suffix)
        added = [token for token in suffix if token in self.tokens.added]
        question = self.template.text_of([{"role": "user", "content": SENTINEL}]).partition(SENTINEL)[2]
        ends = {token for token in added[:1] if token in self.tokens.ids(question) and all(map(self._is_filler, until))}
        return self._stated_ends | ends | set(() if self._stated_ends & {*added} else added[-1:])

    @cached_property
    def turn_end_id(self) -> int:
        """The token by which the template ends an answer; the end token where it has none."""
        return next((token for token in self._suffix(thinks=False) if token in self.end_ids), self._eos_token_id)

    def fingerprint(self) -> str:
        """A digest, equal for tokenizers that make the same tokens of the same text, as far as that can be known."""
        inner = getattr(self.tokens.inner, "backend_tokenizer", None)
        stored = "" if inner is None else inner.to_str()
        template = self.template.fingerprint() if self.template.is_used else ""
        tokens = [self.tokens.ids(SPECIMEN), self.tokens.opening, self._eos_token_id, sorted(self.end_ids)]
        return hashlib.sha256(f"{stored} {template} {tokens}".encode()).hexdigest()

    def stop_generation(self) -> None:
        """Makes mlx-lm's wrapper end answers at the template's end of turn, too."""
        if isinstance(getattr(self.tokenizer, "eos_token_ids", None), set):
            self.tokenizer.eos_token_ids |= self.end_ids

    def prompt_ids(self, prompt: str) -> list[int]:
        """Token ids of a prompt alone, as training encodes it. Raises UserError: the chat template refuses it."""
        try:
            return self.encoded(Plain(prompt, (), "")).prompt
        except Unusable as why:
            raise UserError(f"prompt {prompt[:60]!r}: {why}") from None

    def encoded(self, example: Plain | Chat) -> Tokens:
        """Ids of an example's prompt and of its completions, end token included. Raises Unusable."""
        form = self._choose_form(example)
        return self._encode_chat(form) if isinstance(form, Chat) else self.encode_plain(form)

    def shorten(self, example: Plain | Chat, encoded: Tokens, max_length: int) -> Tokens:
        """A chat that is too long, without its middle messages; other text as it was. Raises Unusable."""
        chat = self._choose_form(example)
        if not isinstance(chat, Chat) or not encoded.completions:
            return encoded
        longest = max(map(len, encoded.completions))

        def size(other: Chat) -> int:
            with contextlib.suppress(Unusable):
                if other is not chat:
                    return len(self.tokens.ids(self.template.render(other).prompt))
            return len(encoded.prompt)

        shorter = _shortened(chat, size, longest, max_length)
        if shorter is not chat:
            with contextlib.suppress(Unusable):
                encoded = self.encoded(shorter)
        room, least = max_length - len(encoded.prompt), max_length - _most_of_prompt(longest, max_length)
        if room < least:
            raise Unusable(
                f"the prompt alone has {len(encoded.prompt)} tokens, and what is not cut of it (system prompt, tools) "
                f"leaves less than {least} of data.max_length={max_length} for the answer; raise it"
            )
        learnt = encoded.learnt and [mask[:room] for mask in encoded.learnt]
        return Tokens(encoded.prompt, [ids[:room] for ids in encoded.completions], learnt=learnt)

    def _choose_form(self, example: Plain | Chat) -> Plain | Chat:
        """Chat where there is a template, and a prompt to put into it; plain otherwise. Raises Unusable."""
        template = self.template
        if not template.is_used:
            return example if isinstance(example, Plain) else self._as_plain(example)
        if isinstance(example, Chat):
            texts = [message.get("content") or "" for message in itertools.chain(example.prompt, *example.completions)]
            answers = [messages[-1].get("content") or "" for messages in example.completions]
        else:
            texts = [text for text in (example.prompt, *example.completions) if text is not None]
            answers = [*example.completions]
            if template.is_rendered(texts[0]):
                return self._as_rendered(example)
            if (mark := template.first_mark(texts[0])).startswith(("<", "[INST]")):
                note = f"texts begin with {mark}, which the chat template does not have; it is rendered as text"
                self.notes[note] = None
        self._note_strange(texts, answers)
        end = self.tokenizer.decode([self.turn_end_id]).strip() or "\0"
        ended = [text for text in texts if text not in answers and text.rstrip().endswith(end)]
        if (bad := next(filter(template.is_rendered, texts), next(iter(ended), None))) is not None:
            raise Unusable(
                f"{bad[:40]!r} carries the chat template's marks already; give the whole prompt so, or no part of it"
            )
        if isinstance(example, Chat) or example.prompt is None:
            return example
        messages = tuple([assistant_message(text)] for text in example.completions)
        return Chat([{"role": "user", "content": example.prompt}], messages, example.columns)

    def _as_rendered(self, example: Plain) -> Plain:
        """A text that is rendered already, as it is; the header of its answers is the prompt's."""
        self.notes["texts carry the chat template's marks already: taken as they are, not rendered again"] = None
        header, prompt, answers = self.template.header, example.prompt or "", example.completions
        if prompt and answers and all(answer.startswith(prompt) for answer in answers):
            return replace(example, completions=tuple(answer.removeprefix(prompt) for answer in answers))
        if not (header and prompt and answers) or self.template.ends_with_header(prompt):
            return example
        begin = re.match(rf"\s*{re.escape(header)}\n*", answers[0])
        if begin is None or not all(answer.startswith(begin[0]) for answer in answers):
            self.notes[f"rendered prompts do not end with {header!r}: their answers are learnt without it"] = None
            return example
        return replace(example, prompt=prompt + begin[0], completions=tuple(a[begin.end() :] for a in answers))

    def _note_strange(self, texts: Sequence[str], answers: Sequence[str]) -> None:
        """Notes what is trained as text, and means something to other models."""
        for end in filter(None, (FOREIGN_END.search(answer[-60:]) for answer in answers)):
            if not self.end_ids & {*self.tokens.ids(end[1])}:
                self.notes[f"answers end with {end[1]}, which ends no turn of this model: it is learnt as text"] = None
        if any(map(LISTED.match, answers)):
            self.notes["answers are lists of messages as text: learnt as that text, not as turns"] = None
        is_asked = texts[0] not in answers and len(texts[0].split()) > 2
        if is_asked and answers and all(answer.startswith(texts[0]) for answer in answers):
            self.notes["answers begin with their whole prompt: what is learnt has it once more"] = None
        for media in filter(None, map(MEDIA_MARK.search, texts)):
            self.notes[f"texts hold {media[0]}, and no media are trained on: it is rendered as text"] = None

    def _as_plain(self, chat: Chat) -> Plain:
        """A question and its answers as text, where data.chat_template=false asks for it. Raises Unusable."""
        contents = [part[0].get("content") for part in (chat.prompt, *chat.completions) if len(part) == 1]
        texts = [content for content in contents if isinstance(content, str)]
        is_text = len(texts) == 1 + len(chat.completions) and not chat.tools
        if self.template.settings.chat_template is not False or not is_text:
            raise Unusable(
                "a chat needs a chat template; give one with data.chat_template=FILE (data.chat_template=false takes a "
                "question and an answer as plain text)"
            )
        return Plain(texts[0], tuple(texts[1:]), chat.columns)

    def encode_plain(self, example: Plain) -> Tokens:
        """Text as it is: the prompt alone, as inference sends it, and each completion as its continuation."""
        prompt, opening = self.tokens.ids(example.prompt or ""), self.tokens.opening
        completions = [self.tokens.continued(text) for text in example.completions]
        # No text gets BOS twice, wherever it was written.
        if not prompt and opening:
            completions = [ids[len(opening) :] if ids[: len(opening)] == opening else ids for ids in completions]
        if prompt[: len(opening)] != opening:
            prompt = opening + prompt
        is_turn = self.template.is_used and self.template.is_rendered(example.prompt or "")
        # A text that is nothing stays so: it is refused.
        return Tokens(prompt, [ids and self._to_end(ids, is_turn) for ids in completions])

    def _to_end(self, ids: list[int], is_turn: bool = False) -> list[int]:
        """Up to the first of the trailing ends of turn, blanks between them; with one, where there is none."""
        cut, index = None, len(ids)
        while index > 0 and (ids[index - 1] in self.end_ids or self.tokens.is_blank(ids[index - 1])):
            index -= 1
            cut = index + 1 if ids[index] in self.end_ids else cut
        return ids[:cut] if cut else [*ids, self.turn_end_id if is_turn else self._eos_token_id]

    # ---- Chats

    def _encode_chat(self, chat: Chat) -> Tokens:
        rendering = self.template.render(chat)
        if marked := self._as_marked(rendering):
            return marked
        completions = [self._finish(rendering, k) for k in range(len(rendering.wholes))]
        masks = [mask for _, mask in completions]
        learnt = None if all(map(all, masks)) else masks
        return Tokens(self.tokens.ids(rendering.prompt), [ids for ids, _ in completions], learnt=learnt)

    # ---- Where a completion begins

    def _place_of_completion(self, rendering: Rendering, k: int) -> tuple[str, int]:
        """The text of completion k's whole conversation, and where in it the completion begins."""
        chat, whole, prompt = rendering.chat, rendering.wholes[k], rendering.prompt
        answer = chat.completions[k]
        if whole.startswith(prompt):
            return whole, len(prompt)
        if place := self.template.place_of(chat, [*chat.prompt, *answer], len(chat.prompt), whole):
            low, high = place
            stop = high + self._end_of_turn(whole[high:]) if len(answer) == 1 else len(whole)
            return whole[:stop], self._behind_header(prompt, whole, low)
        # A call without a text, or an answer that the template takes apart: what a plain answer has before it.
        plain = self.template.apply_or_none(chat, [*chat.prompt, assistant_message(SENTINEL)]) or SENTINEL
        before = plain.partition(SENTINEL)[0]
        if before and whole.startswith(before):
            return whole, self._behind_header(prompt, whole, len(before))
        return whole, self._common(prompt, whole)

    def _end_of_turn(self, suffix: str) -> int:
        """Where in the text behind an answer the first token that ends the turn ends; all of it, where none does."""
        ends = [self.tokens.special.get(token, "") for token in self.end_ids]
        return min((suffix.find(text) + len(text) for text in ends if text and text in suffix), default=len(suffix))

    def _common(self, prompt: str, whole: str) -> int:
        """Where the first token of the whole begins that is not the prompt's."""
        of_whole, begins = self.tokens.starts(whole)
        return [*begins, len(whole)][len(os.path.commonprefix([self.tokens.ids(prompt), of_whole]))]

    def _behind_header(self, prompt: str, whole: str, start: int) -> int:
        """Where the model's own begins, of a whole that leaves the prompt's text before the answer's `start`. That is
        behind the prompt's end, where the whole has it further on; else with a header that the prompt does not have,
        unless that says no more than that there is no thinking."""
        common, end = self._common(prompt, whole[:start]), prompt[-HEADER_CHARACTERS:]
        at = whole.rfind(end, 0, start) + len(end)
        if end in whole[:start] and at > common:
            return at
        marks, header = self.tokens.special.values(), whole[common:start]
        if (opened := OPENED_THINKING.search(prompt)) and header.strip() == f"</{opened[1]}>":
            return common  # an answer without thinking closes the block that its prompt opens
        tail = os.path.commonprefix([prompt[::-1], whole[:start][::-1]])[::-1]
        if any(mark in tail for mark in marks):  # Mistral's system prompt stands in the last question alone
            return start
        is_header = any(mark in header for mark in marks)
        return common if is_header and not EMPTY_THINKING.search(header) else start

    # ---- Where it ends, and what of it is learnt

    def _finish(self, rendering: Rendering, k: int) -> tuple[list[int], list[bool]]:
        """A completion up to its end of turn, and which of its tokens are learnt. Raises Unusable."""
        (whole, start), answer = self._place_of_completion(rendering, k), rendering.chat.completions[k]
        ids, learnt = self.tokens.behind(whole, start), _learnt(rendering.chat, k)
        is_whole = all(learnt) and not all(map(_is_model, answer))  # data.learn=all: every token, headers, too
        if not is_whole and (len(answer) > 1 or not all(learnt)):
            return self._finish_turns(rendering, k, ids)
        ids, unlearnt, whole = self._ended(ids), 0, rendering.wholes[k]
        written = start if is_whole else _written_by_template(whole, start, answer[0])
        if written != start:
            unlearnt = len(ids) - len(self._ended(self.tokens.behind(whole, written)))
        return ids, [index >= unlearnt for index in range(len(ids))]

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the first token of the trailing ones that ends the turn; with one, where the template wrote none."""
        for suffix in self._written_behind:
            if ids[-len(suffix) :] == suffix:
                ids = ids[: -len(suffix)]
        return self._to_end(ids)

    def _finish_turns(self, rendering: Rendering, k: int, ids: list[int]) -> tuple[list[int], list[bool]]:
        """A completion of several messages: up to the last token that is learnt. Raises Unusable."""
        every, begins = self.tokens.starts(rendering.wholes[k])
        first = len(every) - len(ids)
        if every[first:] != ids:
            raise Unusable("its turns cannot be separated: the prompt's end and the answer's begin share a token")
        learnt = [False] * len(every)
        for low, high in self._spans(rendering, k):
            end = behind = bisect.bisect_left(begins, high)
            # And where generation stops, if only special tokens stand between it and the text.
            while end < len(every) and every[end] not in self.end_ids and self._is_filler(every[end]):
                end += 1
            if end < len(every) and every[end] in self.end_ids:
                behind = end + 1
            start = bisect.bisect_left(begins, low)
            learnt[start:behind] = [True] * (behind - start)
        learnt = learnt[first:]
        if not any(learnt):
            raise Unusable("none of its tokens is learnt")
        _, length = bounds_of(learnt)
        if ids[length - 1] not in self.end_ids and all(map(self.tokens.is_blank, ids[length:])):
            return [*ids, self._eos_token_id], [*learnt[:length], *[True] * (len(ids) + 1 - length)]
        return ids[:length], learnt[:length]

    def _is_filler(self, token: int) -> bool:
        return self.tokens.is_blank(token) or token in self.tokens.special

    def _as_marked(self, rendering: Rendering) -> Tokens | None:
        """A conversation of which is learnt what the template marks as the model's; None where it marks nothing."""
        chat = rendering.chat
        if not GENERATION.search(self.template.text) or chat.learnt is None or len(rendering.wholes) != 1:
            return None
        messages, wanted = [*chat.prompt, *chat.completions[0]], [*[False] * len(chat.prompt), *chat.learnt[0]]
        if not all(map(_is_model, itertools.compress(messages, wanted))):
            return None
        spans = self.template.marked(chat, messages)
        of_model = list(itertools.compress(wanted, map(_is_model, messages)))
        if all(of_model):
            of_model = [True] * len(spans)  # Phi-3's template marks an end of the text, too
        ids, begins = self.tokens.starts(rendering.wholes[0])
        learnt = [False] * len(ids)
        for low, high in itertools.compress(spans, of_model if len(spans) == len(of_model) else ()):
            first, last = bisect.bisect_right(begins, low) - 1, bisect.bisect_left(begins, high)
            learnt[first:last] = [True] * (last - first)
        if not any(learnt):
            return None
        start, stop = bounds_of(learnt)
        masks = None if all(learnt[start:stop]) else [learnt[start:stop]]
        return Tokens(ids[:start], [ids[start:stop]], learnt=masks)

    def _spans(self, rendering: Rendering, k: int) -> list[tuple[int, int]]:
        """Begin and end in the text of what the model writes in learnt messages, by rendering what comes before."""
        chat, whole, spans = rendering.chat, rendering.wholes[k], list[tuple[int, int]]()
        messages = [*chat.prompt, *chat.completions[k]]
        for index in itertools.compress(range(len(chat.prompt), len(messages)), _learnt(chat, k)):
            message = messages[index]
            low, high = self.template.place_of(chat, messages, index, whole) or (-1, -1)
            if high < 0 or message.get("tool_calls"):
                until = os.path.commonprefix([self.template.apply(chat, messages[: index + 1]), whole])
                high = len(until)  # without the end of its turn:
                for token, begin in zip(*map(reversed, self.tokens.starts(until)), strict=True):
                    if token not in self.end_ids and not self._is_filler(token):
                        break
                    high = begin
            header = self.template.apply_or_none(chat, messages[:index], is_prompt=_is_model(message))
            common = self._common(header or "", whole)
            if header and not EMPTY_THINKING.sub("", header[common:]).strip():  # Qwen3 writes it before the last alone
                low = _written_by_template(whole, common, message)
            if not low < high or lost(message, whole[low:high], is_earlier=True):
                high = low + self._end_of_turn(whole[low:])
                high = -1 if lost(message, whole[low:high], is_earlier=True) or high == len(whole) else high
            if not 0 <= low < high:
                raise Unusable(
                    f"message {index + 1}: the chat template writes it differently once others follow, so that its "
                    "tokens cannot be found; data.learn=last learns the last answer alone"
                )
            spans.append((low, high))
        return spans

    @cached_property
    def _written_behind(self) -> list[list[int]]:
        """What the template writes behind an answer's end of turn, as Command-R7B's opens another turn; mostly none."""
        written = []
        for suffix in map(self._suffix, (True, False)):
            end = next((i for i, token in enumerate(suffix, 1) if token in self.end_ids), len(suffix))
            if not all(token in self.end_ids or self.tokens.is_blank(token) for token in suffix[end:]):
                written.append(suffix[end:])
        return written

    def _suffix(self, thinks: bool) -> list[int]:
        """What stands behind a plain answer."""
        arguments = {"enable_thinking": thinks, **self.template.settings.chat_template_kwargs}
        text = self.template.text_of([{"role": "user", "content": "a"}, assistant_message(SENTINEL)], **arguments)
        return self.tokens.ids(text.partition(SENTINEL)[2])


def _written_by_template(whole: str, start: int, message: Message) -> int:
    """Where the block of no thinking ends that a template puts before an answer; `start` where there is none."""
    content, match = message.get("content"), EMPTY_THINKING.match(whole, start)
    if match is None or has_reasoning(message) or not isinstance(content, str):
        return start
    behind = whole[match.end() :]
    for text in filter(None, (content, content.lstrip())):
        blanks, separator, _ = behind.partition(text)
        if separator and not blanks.strip():
            return match.end() + len(blanks)
    return match.end()


def _learnt(chat: Chat, k: int) -> Sequence[bool]:
    """Of a completion's messages, which are learnt."""
    return chat.learnt[k] if chat.learnt is not None else [False] * (len(chat.completions[k]) - 1) + [True]


def _is_model(message: Message) -> bool:
    return message["role"] == "assistant"


def chat_ids(encoder: Encoder, messages: list[Message], tools: list[record_formats.JSON] | None = None) -> list[int]:
    """The prompt of a conversation, rendered by the code that renders training rows. messages, tools: as OpenAI has
    them. Raises UserError: the template refuses it or leaves part of it out."""
    try:
        checked = record_formats.check_messages(messages, "messages")
        return encoder.encoded(Chat(checked, (), "messages", None, record_formats.check_tools(tools, "tools"))).prompt
    except Unusable as why:
        raise UserError(str(why)) from None
