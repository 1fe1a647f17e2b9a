"""A model that every rank holds whole, with the adapter of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn

from lib.config import load
from lib.config.schema import Config
from lib.distributed.world import World
from lib.evaluate import batch_inference
from lib.model import adapter_files, adapters
from lib.model import load as load_module
from lib.training import divided_world
from lib.training.checkpoint import file_sha256


@dataclass(frozen=True)
class WholeModel:
    """What is asked: a model, and the folder of an adapter.

    Args:
        adapter: a run's folder or one of its checkpoints; None for the model as it stands.
    """

    settings: Config
    adapter: Path | None

    @property
    def name(self) -> str:
        """For people."""
        return str(self.adapter or self.settings.model.path)

    def load(self, world: World) -> nn.Module:
        """The model on every rank, ready to be asked.

        Raises:
            UserError: the model or the adapter cannot be read.
        """
        settings = self.settings
        model = load_module.load(settings.model, settings.train.seed)
        divided_world.divided(model, None, world, settings.metal.wired)
        if self.adapter is not None or settings.model.adapter is not None:
            adapters.make_trainable(model, settings.model, settings.train.seed)
        if self.adapter is not None:
            adapter_files.load_trained(model, self.adapter, "--run")
        model.eval()
        return model

    def digest(self) -> str:
        """Of the files that the model is made of."""
        settings = self.settings
        parts = [load_module.fingerprint(settings.model, settings.train.seed)]
        if self.adapter is not None:
            weights = self.adapter / adapter_files.ADAPTER_WEIGHTS
            parts.append(file_sha256(weights))
        return batch_inference.key_of(*parts, load.learning_digest(settings))
