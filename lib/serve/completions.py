"""OpenAI's JSON of one answer: whole, or event by event, and the training record that it gives with a label."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator

from lib.serve.generation import Piece
from lib.serve.requests import JSON, ChatRequest, RequestError, TextRequest


class Completion:
    """An answer; `pieces` is what came of it so far."""

    def __init__(self, request: ChatRequest | TextRequest, model: str, prompt_tokens: int) -> None:
        self.request, self.is_chat = request, isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        self.prompt_tokens, self.pieces = prompt_tokens, Piece()

    @property
    def usage(self) -> JSON:
        prompt, count = self.prompt_tokens, self.pieces.count
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def whole(self) -> JSON:
        """The JSON of an answer that has ended."""
        content = {"message": self.message()} if self.is_chat else {"text": self.pieces.text}
        return self._body("chat.completion", self.pieces, **content) | {"usage": self.usage}

    def message(self) -> JSON:
        piece = self.pieces
        message: JSON = {"role": "assistant", "content": piece.text or None}
        message |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in piece.tool_calls]
        return message | ({"tool_calls": calls} if calls else {})

    def _body(self, kind: str, piece: Piece, **content: object) -> JSON:
        logprobs = None if self.request.logprobs_count is None else {"content": piece.logprobs}
        choice = {"index": 0, "finish_reason": piece.finish_reason, "logprobs": logprobs, **content}
        return {**self.head, "object": kind if self.is_chat else "text_completion", "choices": [choice]}

    def _event(self, piece: Piece, is_first: bool) -> JSON:
        if not self.is_chat:
            return self._body("", piece, text=piece.text)
        delta: JSON = {"role": "assistant", "content": ""} if is_first else {}
        delta |= {"content": piece.text} if piece.text else {}
        delta |= {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        delta |= {"tool_calls": piece.tool_calls} if piece.tool_calls else {}
        return self._body("chat.completion.chunk", piece, delta=delta)

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """Server-sent events, the last one [DONE]; an error in the middle is an event, too."""
        is_first = True
        try:
            async for piece in pieces:
                content = piece.text, piece.reasoning, piece.tool_calls, piece.logprobs, piece.finish_reason
                if is_first or any(content):
                    yield f"data: {json.dumps(self._event(piece, is_first))}\n\n"
                    is_first = False
            if (self.request.stream_options or {}).get("include_usage"):
                usage = {**self.head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage}
                yield f"data: {json.dumps(usage)}\n\n"
            yield "data: [DONE]\n\n"
        except RequestError as error:
            yield f"data: {json.dumps(error.body)}\n\n"

    def row(self) -> JSON | None:
        """A training record without its label; None where the answer is empty."""
        row: JSON = {"id": self.id, "model": self.head["model"], "finish_reason": self.pieces.finish_reason}
        if isinstance(self.request, TextRequest):
            text = self.pieces.text
            return row | {"prompt": self.request.text, "completion": text} if text.strip() else None
        message = {key: value for key, value in self.message().items() if value}
        if message.keys() == {"role"}:
            return None
        is_text = message.keys() == {"role", "content"}
        row |= {"prompt": [each.fields() for each in self.request.messages]}
        row |= {"completion": message["content"] if is_text else [message]}
        return row | ({"tools": self.request.tool_definitions} if self.request.tool_definitions else {})
