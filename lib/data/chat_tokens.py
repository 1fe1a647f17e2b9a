"""Chats ➜ token ids of the prompt and of each completion, and which of these are learnt.

At inference a model is sent the prompt's tokens, and appends its own until one of them ends its turn. So the prompt is
what inference sends, and a completion is what stands behind it in the tokens of the whole conversation, up to the
first token that ends the turn. Some templates give the whole another beginning than the prompt: they open a block of
thinking in the prompt, or drop a system prompt once there is an answer. Then the completion is the whole's last turn,
from where the answer begins.
"""

from __future__ import annotations

import bisect
import itertools
import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lib.data.chat_template import (
    EMPTY_THINKING,
    ChatTemplate,
    Conversation,
    Rendering,
)
from lib.data.lost_text import SENTINEL, has_reasoning
from lib.data.record_formats import Chat, Message, Unusable
from lib.data.text_tokens import TextTokens

# Characters of a prompt's end that tell it from other text.
HEADER = 12


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example."""

    prompt: list[int]
    completions: list[list[int]]
    learnt: list[list[bool]] | None = None
    """Of each completion's tokens, which are trained on; None for all."""


class ChatTokens:
    """Chats ➜ token ids, through the chat template.

    Args:
        end_ids: tokens at which generation stops.
        eos_token_id: ends a turn that the template leaves open.
    """

    def __init__(self, template: ChatTemplate, tokens: TextTokens, end_ids: set[int], eos_token_id: int) -> None:
        self.template, self.tokens, self.eos_token_id = template, tokens, eos_token_id
        self._known_ends = end_ids

    @cached_property
    def end_ids(self) -> set[int]:
        """Tokens at which generation has to stop: those that are known, or else the template's own end of a turn."""
        special = [token for token in self._suffix(thinks=False) if token in self.tokens.special]
        is_known = bool(self._known_ends & set(special))
        return self._known_ends if is_known else self._known_ends | set(special[-1:])

    def encode(self, chats: Sequence[Chat]) -> list[Encoded | Unusable]:
        """Ids of each chat; or why there are none."""
        renderings = self.template.render(chats)
        prompts = iter(self.tokens.ids([made.prompt for made in renderings if isinstance(made, Rendering)]))
        result: list[Encoded | Unusable] = []
        places: list[tuple[int, list[tuple[str, int]]]] = []
        for index, made in enumerate(renderings):
            if isinstance(made, Unusable):
                result.append(made)
                continue
            result.append(Encoded(next(prompts), []))
            try:
                places.append((index, [self._place_of_completion(made, k) for k in range(len(made.wholes))]))
            except Unusable as why:
                result[index] = why
        behind = iter(self.tokens.behind([place for _, of_chat in places for place in of_chat]))
        for index, of_chat in places:
            made, encoded = renderings[index], result[index]
            assert isinstance(made, Rendering) and isinstance(encoded, Encoded)
            ids = [next(behind) for _ in of_chat]
            try:
                if (marked := self._as_marked(made)) is not None:
                    result[index] = marked
                    continue
                finished = [self._finish(made, k, start, ids[k]) for k, (_, start) in enumerate(of_chat)]
            except Unusable as why:
                result[index] = why
                continue
            learnt = None
            if any(mask is not None for _, mask in finished):
                learnt = [mask or [True] * len(completion) for completion, mask in finished]
            result[index] = Encoded(encoded.prompt, [completion for completion, _ in finished], learnt)
        return result

    # ---- Where a completion begins

    def _place_of_completion(self, made: Rendering, k: int) -> tuple[str, int]:
        """The text of completion k's whole conversation, and where in it the completion begins. Raises Unusable."""
        answer, whole = made.chat.completions[k], made.wholes[k]
        if whole.startswith(made.prompt):
            return whole, len(made.prompt)
        place = self._place(made, k, len(made.chat.prompt))
        if place is not None:
            low, high = place
            stop = high + self._end_of_turn(whole[high:]) if len(answer) == 1 else len(whole)
            return whole[:stop], self._behind_header(made.prompt, whole, low)
        # A call without a text, or an answer that the template takes apart: what a plain answer has before it.
        plain: Message = {"role": "assistant", "content": SENTINEL}
        given = self.template.arguments(made.chat)
        (other,) = self.template.texts([Conversation([*made.chat.prompt, plain], made.chat.tools, given)], False)
        before = "" if isinstance(other, Unusable) else other.partition(SENTINEL)[0]
        if before and whole.startswith(before):
            return whole, self._behind_header(made.prompt, whole, len(before))
        return whole, self._common(made.prompt, whole)

    def _end_of_turn(self, behind: str) -> int:
        """Where in the text behind an answer the first token that ends the turn ends; all of it, where none does."""
        ends = [self.tokens.special.get(token, "") for token in self.end_ids]
        found = [behind.find(text) + len(text) for text in ends if text and text in behind]
        return min(found, default=len(behind))

    def _common(self, prompt: str, whole: str) -> int:
        """Where the first token of the whole begins that is not the prompt's."""
        of_prompt, (of_whole, begins) = self.tokens.ids([prompt])[0], self.tokens.starts(whole)
        count = next(
            (i for i, (a, b) in enumerate(zip(of_prompt, of_whole, strict=False)) if a != b),
            min(len(of_prompt), len(of_whole)),
        )
        return begins[count] if count < len(begins) else len(whole)

    def _behind_header(self, prompt: str, whole: str, start: int) -> int:
        """Where the model's own begins, of a whole that leaves the prompt's text before the answer's `start`.

        That is behind the prompt's end, where the whole has it, too, further on; else with a header that the prompt
        does not have (the mark of a response, say), unless that says no more than that there is no thinking.
        """
        common = self._common(prompt, whole[:start])
        ends = (at for at in range(start, common, -1) if whole.endswith(prompt[-HEADER:], 0, at))
        again = next(ends, None)
        if again is not None:
            return again
        header = whole[common:start]
        is_header = any(mark in header for mark in self.tokens.special.values())
        return common if is_header and not EMPTY_THINKING.search(header) else start

    def _place(self, made: Rendering, k: int, index: int) -> tuple[int, int] | None:
        """Where message `index` of the whole conversation stands in its text."""
        chat = made.chat
        conversation = Conversation([*chat.prompt, *chat.completions[k]], chat.tools, self.template.arguments(chat))
        return self.template.place_of(conversation, index, made.wholes[k])

    # ---- Where it ends, and what of it is learnt

    def _finish(self, made: Rendering, k: int, start: int, ids: list[int]) -> tuple[list[int], list[bool] | None]:
        """A completion up to its end of turn, and which of its tokens are learnt, None for all. Raises Unusable."""
        answer = made.chat.completions[k]
        learnt = self._learnt(made.chat, k)
        is_whole = all(learnt) and not all(map(_is_model, answer))  # data.learn=all: every token, headers, too
        if not is_whole and (len(answer) > 1 or not all(learnt)):
            return self._finish_turns(made, k, start, ids)
        ids = self._ended(ids)
        written = start if is_whole else self._written_by_template(made.wholes[k], start, answer[0])
        if written == start:
            return ids, None
        count = len(ids) - len(self._ended(self.tokens.behind([(made.wholes[k], written)])[0]))
        return ids, [index >= count for index in range(len(ids))]

    def _written_by_template(self, whole: str, start: int, message: Message) -> int:
        """Where the block of no thinking ends that a template puts before an answer; `start` where there is none."""
        content = message.get("content")
        match = EMPTY_THINKING.match(whole, start)
        if match is None or has_reasoning(message) or not isinstance(content, str):
            return start
        behind = whole[match.end() :]
        for text in (content, content.lstrip()):
            at = behind.find(text) if text else -1
            if at >= 0 and not behind[:at].strip():
                return match.end() + at
        return match.end()

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the first token of the trailing ones that ends the turn; with one, where the template wrote none."""
        for written in self._written_behind:
            if ids[-len(written) :] == written:
                ids = ids[: -len(written)]
        return ended(ids, self.end_ids, self.tokens, self.eos_token_id)

    def _finish_turns(self, made: Rendering, k: int, start: int, ids: list[int]) -> tuple[list[int], list[bool]]:
        """A completion of several messages: up to the last token that is learnt. Raises Unusable."""
        whole = made.wholes[k]
        every, begins = self.tokens.starts(whole)
        first = len(every) - len(ids)
        if every[first:] != ids:
            raise Unusable("its turns cannot be told apart: the prompt's end and the answer's begin share a token")
        spans = self._spans(made, k)
        mask = [any(low <= at < high for low, high in spans) for at in begins]
        learnt = self._with_ends(every, begins, mask, [high for _, high in spans])[first:]
        if not any(learnt):
            raise Unusable("none of its tokens is learnt")
        length = len(learnt) - learnt[::-1].index(True)
        ids, learnt = ids[:length], learnt[:length]
        if length == len(every) - first and ids[-1] not in self.end_ids:
            return [*ids, self.eos_token_id], [*learnt, True]
        return ids, learnt

    def _with_ends(self, ids: list[int], begins: list[int], mask: list[bool], ends: list[int]) -> list[bool]:
        """Learns the token that ends a turn, too, where nothing but special tokens stands between it and the text.

        Only tokens at which generation stops: gpt-oss ends earlier turns with another, which answers must not end with.
        """
        mask = list(mask)
        for end in ends:
            first = index = bisect.bisect_left(begins, end)
            while index < len(ids) and ids[index] not in self.end_ids:
                if not (self.tokens.is_blank(ids[index]) or ids[index] in self.tokens.special):
                    break
                index += 1
            if index < len(ids) and ids[index] in self.end_ids:
                mask[first : index + 1] = [True] * (index + 1 - first)
        return mask

    def _learnt(self, chat: Chat, k: int) -> Sequence[bool]:
        """Of a completion's messages, which are learnt."""
        if chat.learnt is not None:
            return chat.learnt[k]
        return [index == len(chat.completions[k]) - 1 for index in range(len(chat.completions[k]))]

    def _as_marked(self, made: Rendering) -> Encoded | None:
        """A conversation of which is learnt what the template marks as the model's; what comes before is the prompt.

        None where the template marks nothing, or not message by message, or where others' messages are learnt, too.
        """
        chat = made.chat
        if not self.template.has_marks or chat.learnt is None or len(made.wholes) != 1:
            return None
        (whole,) = made.wholes
        messages = [*chat.prompt, *chat.completions[0]]
        wanted = [*[False] * len(chat.prompt), *self._learnt(chat, 0)]
        if any(is_learnt and not _is_model(message) for message, is_learnt in zip(messages, wanted, strict=True)):
            return None
        spans = self.template.marked(Conversation(messages, chat.tools, self.template.arguments(chat)))
        of_model = [is_learnt for message, is_learnt in zip(messages, wanted, strict=True) if _is_model(message)]
        if all(of_model):
            of_model = [True] * len(spans)  # Phi-3's template marks an end of the text, too
        if len(spans) != len(of_model):
            return None
        ids, begins = self.tokens.starts(whole)
        learnt = [False] * len(ids)
        for low, high in itertools.compress(spans, of_model):
            first, last = bisect.bisect_right(begins, low) - 1, bisect.bisect_left(begins, high)
            learnt[first:last] = [True] * (last - first)
        if not any(learnt):
            return None
        start, stop = learnt.index(True), len(learnt) - learnt[::-1].index(True)
        mask = learnt[start:stop]
        return Encoded(ids[:start], [ids[start:stop]], None if all(mask) else [mask])

    def _spans(self, made: Rendering, k: int) -> list[tuple[int, int]]:
        """Begin and end in the text of what the model writes in learnt messages, by rendering what comes before."""
        chat, whole = made.chat, made.wholes[k]
        messages = [*chat.prompt, *chat.completions[k]]
        given = self.template.arguments(chat)
        spans = []
        for index, is_learnt in enumerate(self._learnt(chat, k), len(chat.prompt)):
            if not is_learnt:
                continue
            before = Conversation(messages[:index], chat.tools, given)
            (header,) = self.template.texts([before], messages[index]["role"] == "assistant")
            place = self._place(made, k, index)
            if isinstance(header, str) and whole.startswith(header):
                low = self._written_by_template(whole, len(header), messages[index])
            elif place is not None:
                low = place[0]
            else:
                raise Unusable(
                    f"message {index + 1}: the chat template writes it differently once others follow, so that its "
                    "tokens cannot be told; data.learn=last learns the last answer alone"
                )
            spans.append((low, self._end_of(messages, index, whole, low, place, before)))
        return spans

    def _end_of(
        self,
        messages: list[Message],
        index: int,
        whole: str,
        low: int,
        place: tuple[int, int] | None,
        before: Conversation,
    ) -> int:
        """Where the text of message `index` ends, without the end of its turn. Raises Unusable."""
        if place is not None and not messages[index].get("tool_calls"):
            return place[1]
        (until,) = self.template.texts([before._replace(messages=messages[: index + 1])], False)
        if isinstance(until, Unusable):
            raise until
        common = len(os.path.commonprefix([until, whole]))
        ids, begins = self.tokens.starts(whole[:common])
        while ids and (ids[-1] in self.end_ids or self.tokens.is_blank(ids[-1]) or ids[-1] in self.tokens.special):
            common = begins[-1]
            ids, begins = ids[:-1], begins[:-1]
        if common <= low:
            raise Unusable(
                f"message {index + 1}: the chat template writes it differently once others follow, so that its tokens "
                "cannot be told; data.learn=last learns the last answer alone"
            )
        return common

    @cached_property
    def _written_behind(self) -> list[list[int]]:
        """What the template writes behind an answer's end of turn, as Command-R7B's opens another turn; mostly none."""
        found = []
        for suffix in (self._suffix(thinks=True), self._suffix(thinks=False)):
            end = next((i for i, token in enumerate(suffix) if token in self.end_ids), len(suffix))
            behind = suffix[end + 1 :]
            if not all(token in self.end_ids or self.tokens.is_blank(token) for token in behind):
                found.append(behind)
        return found

    def _suffix(self, thinks: bool) -> list[int]:
        """What stands behind a plain answer."""
        messages: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        arguments = self.template.arguments(Chat([], (), ""))
        if "enable_thinking" not in self.template.settings.chat_template_kwargs:
            arguments["enable_thinking"] = thinks
        (text,) = self.template.texts([Conversation(messages, None, arguments)], False)
        return [] if isinstance(text, Unusable) else self.tokens.ids([text.partition(SENTINEL)[2]])[0]


def ended(ids: list[int], end_ids: set[int], tokens: TextTokens, eos_token_id: int) -> list[int]:
    """Up to the first of the trailing tokens, blanks between them, that is an end; with one, where there is none."""
    cut, index = None, len(ids)
    while index > 0 and (ids[index - 1] in end_ids or tokens.is_blank(ids[index - 1])):
        index -= 1
        cut = index + 1 if ids[index] in end_ids else cut
    return ids[:cut] if cut is not None else [*ids, eos_token_id]


def _is_model(message: Message) -> bool:
    return message["role"] == "assistant"
