"""The served model: loaded as stored, with its adapter; prompts are rendered by the code that renders training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.config.settings import DataSettings, ModelSettings
from lib.data.record_formats import Message
from lib.data.tokenize import Encoder, render_prompt
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import UserError
from lib.model.load import compute_type
from lib.serve.requests import ChatRequest, TextRequest
from lib.system import model_folder


class ServedModel:
    """A model of a folder, with a run's adapter where `run` names one; fuse: fused into the weights, in memory.

    data: of the run: the chat template and its arguments.

    Raises UserError: the model has no tokenizer, or data.chat_template cannot be read.
    """

    def __init__(self, settings: ModelSettings, data: DataSettings, folder: Path, run: Path | None, fuse: bool) -> None:
        self.settings, self.folder, self.run, self.fuse = settings, folder, run, fuse
        self.tokenizer: Any = load_tokenizer_of(settings)
        if self.tokenizer is None:
            raise UserError(f"model.path {settings.path}: the model has no tokenizer, and requests are texts")
        self.encoder = Encoder(self.tokenizer, data, None)
        self.has_template = self.encoder.template.is_used
        self.computes = compute_type(settings)
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab_size = stored.get("vocab_size") or (stored.get("text_config") or {}).get("vocab_size")
        self.vocab_size: int = vocab_size or 2**31
        self.context_tokens: int = model_folder.context_tokens(stored) or 2**31

    def load(self) -> tuple[Any, Any, list[int]]:
        """The model, the tokenizer, and the tokens that end an answer: the end of turn of training among them."""
        model, _ = load_model(self.folder, lazy=True, trust_remote_code=self.settings.trust_remote_code)
        if self.run is not None:
            load_adapters(model, str(self.run))
        if self.fuse:
            fused = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
            model.update_modules(tree_unflatten(fused))
        if dtype := self.settings.dtype or ("float32" if self.computes.is_float32 else None):
            model.set_dtype(getattr(mx, dtype))
        model.eval()
        mx.eval([array for _, array in tree_flatten(model.parameters())])
        return model, self.tokenizer, sorted(self.encoder.end_ids)

    def prompt_ids(self, request: ChatRequest | TextRequest) -> list[int]:
        """A request's token ids, as a training row's prompt has them.

        Raises UserError: the template does not take a message or tools; names which.
        """
        if isinstance(request, TextRequest):
            if not self.has_template:
                return self.encoder.prompt_ids(request.text)
            return [int(token) for token in self.tokenizer.encode(request.text)]
        tools = request.tool_definitions
        messages = cast(list[Message], [message.fields() for message in request.messages])
        rendered = render_prompt(self.encoder, messages, tools)
        lost = [name for tool in tools or () if (name := tool["function"]["name"]) not in rendered.text]
        if lost:
            raise UserError(f"the chat template leaves out tools ({', '.join(lost)}); ask without them")
        return rendered.ids
