"""The served model: loaded as stored, with its adapter, and prompts rendered by the code that renders training rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.config.settings import Config
from lib.data.record_formats import Chat, Unusable, check_messages, check_tools
from lib.data.tokenize import Encoder
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import UserError
from lib.serve.requests import ChatRequest, TextRequest


class ServedModel:
    """A run's model, or one without an adapter.

    Raises:
        UserError: the model has no tokenizer, or data.chat_template cannot be read.
    """

    def __init__(self, settings: Config, folder: Path, run: Path | None) -> None:
        self.settings, self.folder, self.run = settings, folder, run
        tokenizer: Any = load_tokenizer_of(settings.model)
        if tokenizer is None:
            raise UserError(f"model.path {settings.model.path}: the model has no tokenizer, and requests are texts")
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, settings.data, None)

    def load(self) -> tuple[Any, Any, list[int]]:
        """The model, the tokenizer, and the tokens that end an answer: those that training put among them."""
        settings = self.settings.model
        model, _ = load_model(self.folder, lazy=True, trust_remote_code=settings.trust_remote_code)
        if self.run is not None:
            load_adapters(model, str(self.run))
        if self.settings.serve.fuse:
            fused = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
            model.update_modules(tree_unflatten(fused))
        dtype = settings.dtype or ("float32" if mx.default_device() == mx.Device(mx.cpu) else None)
        if dtype is not None:  # a CPU computes 16 bits several times slower than float32
            model.set_dtype(getattr(mx, dtype))
        model.eval()
        mx.eval([array for _, array in tree_flatten(model.parameters())])
        return model, self.tokenizer, sorted(self.encoder.end_ids)

    def prompt_ids(self, asked: ChatRequest | TextRequest) -> list[int]:
        """A request's token ids, as a training row's prompt has them.

        Raises:
            UserError: the template does not take a message or tools; names which.
        """
        if isinstance(asked, TextRequest):
            return [int(token) for token in self.tokenizer.encode(asked.text)]
        try:
            messages = check_messages([message.fields() for message in asked.messages], "messages")
            tools = check_tools(asked.tool_definitions, "tools")
        except Unusable as error:
            raise UserError(str(error)) from None
        (encoded,) = self.encoder.encode([Chat(messages, (), "messages", tools=tools)])
        if isinstance(encoded, Unusable):
            raise UserError(str(encoded))
        text = self.tokenizer.decode(encoded.prompt) if tools else ""
        if lost := [name for tool in tools or () if (name := tool["function"]["name"]) not in text]:
            raise UserError(f"the chat template leaves out tools ({', '.join(lost)}); ask without them")
        return encoded.prompt
